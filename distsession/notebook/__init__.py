"""IPython's front end: magics and live output."""
