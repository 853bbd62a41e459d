"""Starting ranks and talking to them."""
