"""Pictures of plain records: partitions and curves, as PNG files or as text; no live objects, only what JSON holds."""
