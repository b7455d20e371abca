"""Make an ordinary model elastic: find out what can be, describe it, insert the operators.

Which file answers which question:

- `description.py`: what was found, in one form for every source: `Group`, `Member`, `Stage`, `Description`.
- `insert.py`: `insert_`.
"""
