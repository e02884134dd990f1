"""What a step is compiled for: chips, whether here or not, and their compilers."""

from jaxmem.targets._chip import Chip as Chip
from jaxmem.targets._chip import GpuFacts as GpuFacts
from jaxmem.targets._chip import TpuFacts as TpuFacts
from jaxmem.targets._compile import compile_lowered as compile_lowered
from jaxmem.targets._compile import compile_noting as compile_noting
from jaxmem.targets._compile import compile_on as compile_on
from jaxmem.targets._compile import refusing_options as refusing_options
from jaxmem.targets._device_memory import DeviceMemory as DeviceMemory
from jaxmem.targets._device_memory import device_memory as device_memory
from jaxmem.targets._limits import check_runs as check_runs
from jaxmem.targets._limits import unknown_scratch_bytes as unknown_scratch_bytes
from jaxmem.targets._mesh import describe_mesh as describe_mesh
from jaxmem.targets._mesh import in_mesh as in_mesh
from jaxmem.targets._mesh import mesh_of as mesh_of
from jaxmem.targets._mesh import one_device as one_device
from jaxmem.targets._names import CHIPS as CHIPS
from jaxmem.targets._names import KNOWN_TARGETS as KNOWN_TARGETS
from jaxmem.targets._names import find_chip as find_chip
from jaxmem.targets._oom import CompileOom as CompileOom
from jaxmem.targets._oom import compile_oom as compile_oom
from jaxmem.targets._place import Placed as Placed
from jaxmem.targets._place import place as place
from jaxmem.targets._scope import Scope as Scope
from jaxmem.targets._scope import on_target as on_target
from jaxmem.targets._target import Target as Target
from jaxmem.targets._target import resolve_target as resolve_target
