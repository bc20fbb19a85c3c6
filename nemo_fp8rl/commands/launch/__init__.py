"""`nemo-fp8rl launch`: a recipe on one machine, on SLURM or on Kubernetes.

    settings.py   what a site asks for, from a file of its own: partitions, images, secrets, limits
    job.py        what is to run: the driver's command and the nodes, from the recipe and the settings
    template.py   fills in the files of templates/, quoting what goes into them
    local.py slurm.py kubernetes.py   render and submit, one module a place
    preflight.py node.py ready.py     what runs on the nodes of a SLURM job, in this order

Nothing here changes a number of a run.
"""
