"""How this library writes and reads files: replaced as a whole, versioned, never executed, resumable.

`fork.py` says what becomes of locks in a process that was forked.
"""
