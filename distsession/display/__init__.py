"""Facts as text and as HTML: what a notebook, a terminal and a report show."""
