"""The shared machine: vocabulary, ledger, the one loop and the recorder. Never imports torch."""
