"""Cache of teachers' scores on disk: ``actor_rollout_ref.teacher.cache_dir``.

`files` keeps scores in files of limited total size, `scores` requests what they do not have. Each process that receives
scores opens the cache itself, so that the rows do not pass through the driver. Imported by scoring workers, so nothing
here may import torch.
"""
