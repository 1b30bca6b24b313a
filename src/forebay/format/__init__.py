"""What bytes mean: names, images, records, manifest, messages. Pure: no I/O, no torch."""
