"""Parts of papers that are reproduced and measured here, and that no server needs."""
