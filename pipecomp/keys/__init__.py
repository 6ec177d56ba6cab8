"""Who belongs to a run: its certificate authority, a certificate for each machine, and connections that check them."""
