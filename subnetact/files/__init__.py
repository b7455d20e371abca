"""How this library writes and reads files: replaced as a whole, versioned, never executed, resumable; and locks after a fork."""
