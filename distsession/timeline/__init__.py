"""What the ranks did in a cell, and who waited for whom."""
