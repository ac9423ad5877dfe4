"""Ray: placement, train group, rollout manager, deadlines, fault handling."""
