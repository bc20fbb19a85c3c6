"""The commands that surround training: launch, doctor, report, compare, parity, export, sft, demo."""
