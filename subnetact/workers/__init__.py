"""Worker processes: they run the batches of a `Batcher`, each in an interpreter of its own.

Weights, inputs and outputs are in memory that all processes map; a pipe carries what is left of a batch.

- `pool.py`: how many processes run, and how a spare replaces one that died (`ProcessPool`).
- `process.py`: one process as its parent sees it; `child.py`: the program that it runs.
- `engine_snapshot.py`: how an engine reaches a process, and how its changes do.
- `memory.py`: shared memory, and inputs and outputs in it.
"""
