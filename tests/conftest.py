"""What all tests need of the process that runs them."""

import signal

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every program
# that a test starts to see what it makes of one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
