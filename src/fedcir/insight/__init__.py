"""What runs came to, for people: charts, tables, pages, the paper's experiments."""
