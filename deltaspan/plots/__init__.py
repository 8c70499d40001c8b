"""Pictures and tables of plain records: partitions, plans and curves, as PNG files or as text."""
