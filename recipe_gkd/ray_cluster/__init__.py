"""Ray: connection, resource pools, placement, worker groups, and replacement of dead workers."""
