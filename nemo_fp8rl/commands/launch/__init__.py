"""`nemo-fp8rl launch`: a recipe on one machine, on SLURM or on Kubernetes.

    settings.py     the site file: partitions, images, secrets, limits; kubernetes_settings.py has its Kubernetes block
    job.py          the driver's command and its nodes, from the recipe and the settings
    template.py     fills in the files of templates/ and quotes every value
    local.py, slurm/job_script.py, kubernetes.py    render and submit, one module for each target
    slurm/preflight.py, node.py, ready.py           run on the nodes of a SLURM job, in this order

A launch changes no number of a run.
"""
