"""Out-of-memory texts of JAX, XLA, CUDA and the host, explained."""

from jaxmem.analysis.oom._explain import NoOomFound as NoOomFound
from jaxmem.analysis.oom._explain import explain_oom as explain_oom
from jaxmem.analysis.oom._records import OomAdvice as OomAdvice
from jaxmem.analysis.oom._records import OomBuffer as OomBuffer
from jaxmem.analysis.oom._records import OomExplanation as OomExplanation
from jaxmem.analysis.oom._records import OomFact as OomFact
