"""TorchScript export: one file that runs any registered subnet, in C++, Triton and Python.

* `exporter`: `to_torchscript`, the checks of its arguments, and the file.
* `symbolic_trace`: records the network once, with the subnet as an argument.
* `recorder`: the graph of that recording, and its text, by which two graphs are compared.
* `module`: the methods of the file: `forward`, `describe`, `choose` and others.
* `storage`: how the file stores tensors.
* `comparison`: compares the outputs of the file with those of the supernet.

When this folder ends: TorchScript is in maintenance, and PyTorch does not support it from Python 3.14 on.
When Python 3.13 reaches its end of life (October 2029), this folder is deleted. Its successor is
`torch.export` (`subnetact.export.to_exported_programs`), which writes one program per subnet over one file of
weights. Files that were written before keep running wherever a libtorch loads TorchScript.
"""
