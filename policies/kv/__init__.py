"""Memory policies for serving: how jobs get pages of KV, and which job is preempted.

One file per named policy; `paged_allocation` holds what the paged ones share. They may import
engine.contract; never schedulings.
"""
