"""`torch.export` programs and AOTInductor packages: one per subnet, over one file of weights.

* `exporter`: `to_exported_programs` writes them.
* `graph_program`: runs a graph without torch's loader, which would evaluate strings of the file.
* `exported_engine`: `load_exported` reads them into an `ExportedEngine`, which is called like an engine.
* `program`: traces one subnet; the ONNX and Triton exports use it as well.
* `shared_tensors`: the file of weights, of which all programs' tensors are views.
"""
