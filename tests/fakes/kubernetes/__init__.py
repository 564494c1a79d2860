"""A Kubernetes that is small: an HTTP API, a job controller, and a kubelet that starts containers as local processes.

For Dagster's own run launcher and run monitoring, over HTTP and by a kubeconfig, as with any cluster. What it has:
jobs, pods, events, config maps and secrets, with selectors and watches; graceful deletion, the eviction API, init
containers and native sidecars, probes, volumes, environment from config maps and secrets, deadlines, time to live;
nodes with GPUs that can be lost. Every job is held strictly against the schema of Kubernetes.

What it has not: images (a name stands for a command), file systems and networks of their own (a pod's port is another
free port of this machine, and its volumes are folders; both are put in their place wherever the pod's texts name them),
users, quotas, preemption by priority (a test deletes or evicts the pod, which is what the scheduler does).
"""

from tests.fakes.kubernetes.cluster import Cluster, running
from tests.fakes.kubernetes.containers import Image
from tests.fakes.kubernetes.kubelet import GPU, Node

__all__ = ["GPU", "Cluster", "Image", "Node", "running"]
