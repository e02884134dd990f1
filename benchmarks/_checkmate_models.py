"""Four convolutional networks, layer by layer, written from their papers, float32.

A layer is what Keras calls one: a convolution with the activation that follows it when there is no normalisation in
between, a normalisation, an activation, a padding. That decides how many values there are to keep. A layer's FLOPs are
multiply-adds, normalisation 4 and activation 1 an element; moving data (pooling, padding, joining, reshaping) is free.

* VGG19: arXiv:1409.1556, table 1, column E.
* U-Net: arXiv:1505.04597 with VGG16's first four blocks going down and normalised convolutions coming up, three skips
  joined from the pools' outputs, 19 classes: the one that Checkmate measured, at 416×608.
* MobileNet: arXiv:1704.04861, table 1. A stride of two pads first.
* ResNet-50: arXiv:1512.03385, table 1 and figure 5, the stride in a block's first convolution.
"""

import dataclasses
import math

from benchmarks._checkmate_graph import Graph

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What is needed to run a layer.

    Args:
      kind: such as "conv".
      reads: the values that it reads, None for the image.
      block: the number of the part of the network that it belongs to.
      options: of the kind.
    """

    kind: str
    reads: tuple[int | None, ...]
    block: int
    options: dict[str, int | bool]


class Layers:
    """Collects layers; each method takes the value that it reads (None is the image) and returns its own.

    A value is an index; shapes are (height, width, channels).
    """

    def __init__(self, *shape: int):
        self.shape: dict[int | None, tuple[int, ...]] = {None: shape}
        self.layers: list[Layer] = []
        self.flops: list[int] = []
        self.parameters = 0
        self.block = 0

    def next_block(self) -> None:
        """What follows belongs to the network's next part: what would be a module of its own."""
        self.block += 1

    def add(self, kind: str, inputs, shape, *, flops: int = 0, parameters: int = 0, **options) -> int:
        reads = inputs if isinstance(inputs, tuple) else (inputs,)
        self.shape[len(self.layers)] = tuple(shape)
        self.layers.append(Layer(kind=kind, reads=reads, block=self.block, options=options))
        self.flops.append(flops)
        self.parameters += parameters
        return len(self.layers) - 1

    def conv(self, x, channels: int, kernel: int, stride: int = 1, *, same: bool = True, bias: bool = True) -> int:
        height, width, incoming = self.shape[x]
        lost = 0 if same else kernel - 1
        shape = (-(-(height - lost) // stride), -(-(width - lost) // stride), channels)
        weights = kernel * kernel * incoming
        flops = weights * math.prod(shape)
        options = {"kernel": kernel, "stride": stride, "same": same, "bias": bias}
        return self.add("conv", x, shape, flops=flops, parameters=(weights + bias) * channels, **options)

    def depthwise(self, x, stride: int = 1) -> int:
        height, width, channels = self.shape[x]
        lost = 2 if stride > 1 else 0
        shape = (-(-(height - lost) // stride), -(-(width - lost) // stride), channels)
        options = {"stride": stride, "same": stride == 1}
        return self.add("depthwise", x, shape, flops=9 * math.prod(shape), parameters=9 * channels, **options)

    def norm(self, x) -> int:
        shape = self.shape[x]
        return self.add("norm", x, shape, flops=4 * math.prod(shape), parameters=4 * shape[-1])

    def relu(self, x) -> int:
        return self.add("relu", x, self.shape[x], flops=math.prod(self.shape[x]))

    def pad(self, x, extra: int) -> int:
        height, width, channels = self.shape[x]
        return self.add("pad", x, (height + extra, width + extra, channels), extra=extra)

    def pool(self, x, size: int = 2, *, stride: int = 2) -> int:
        height, width, channels = self.shape[x]
        shape = ((height - size) // stride + 1, (width - size) // stride + 1, channels)
        return self.add("pool", x, shape, size=size, stride=stride)

    def mean(self, x) -> int:
        return self.add("mean", x, self.shape[x][-1:])

    def reshape(self, x, *shape: int) -> int:
        return self.add("reshape", x, shape)

    def dense(self, x, channels: int) -> int:
        (incoming,) = self.shape[x]
        return self.add("dense", x, (channels,), flops=incoming * channels, parameters=(incoming + 1) * channels)

    def sum(self, *xs) -> int:
        shape = self.shape[xs[0]]
        return self.add("sum", xs, shape, flops=len(xs) * math.prod(shape))

    def grow(self, x) -> int:
        height, width, channels = self.shape[x]
        shape = (2 * height, 2 * width, channels)
        return self.add("grow", x, shape, flops=math.prod(shape))

    def join(self, *xs) -> int:
        height, width, _ = self.shape[xs[0]]
        return self.add("join", xs, (height, width, sum(self.shape[x][-1] for x in xs)))

    def graph(self) -> Graph:
        """Parameters count twice, once for their gradients; the image is not counted."""
        return Graph(
            names=tuple(f"{layer.kind}_{i}" for i, layer in enumerate(self.layers)),
            inputs=tuple(tuple(i for i in layer.reads if i is not None) for layer in self.layers),
            bytes=tuple(FLOAT32_BYTES * math.prod(self.shape[i]) for i in range(len(self.layers))),
            flops=tuple(self.flops),
            forward=len(self.layers),
            fixed_bytes=2 * FLOAT32_BYTES * self.parameters,
        )


def vgg19(side: int = 224) -> Layers:
    net = Layers(side, side, 3)
    x = None
    for channels, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            x = net.conv(x, channels, 3)
        x = net.pool(x)
        net.next_block()
    x = net.reshape(x, math.prod(net.shape[x]))
    for channels in (4096, 4096, 1000):
        x = net.dense(x, channels)
    return net


def unet(height: int = 416, width: int = 608) -> Layers:
    net = Layers(height, width, 3)
    x, skips = None, []
    for channels, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3)):
        for _ in range(convolutions):
            x = net.conv(x, channels, 3)
        x = net.pool(x)
        skips.append(x)
        net.next_block()
    for channels, skip in ((512, None), (256, skips[2]), (128, skips[1]), (64, skips[0])):
        if skip is not None:
            x = net.join(net.grow(x), skip)
        x = net.norm(net.conv(net.pad(x, 2), channels, 3, same=False))
        net.next_block()
    x = net.conv(x, 19, 3)
    height, width, classes = net.shape[x]
    net.relu(net.reshape(x, height * width, classes))  # the softmax, at the price of an activation
    return net


def mobilenet(side: int = 224) -> Layers:
    net = Layers(side, side, 3)
    x = net.conv(net.pad(None, 1), 32, 3, 2, same=False, bias=False)
    x = net.relu(net.norm(x))
    widths = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
    for channels, stride in widths:
        net.next_block()
        if stride > 1:
            x = net.pad(x, 1)
        x = net.relu(net.norm(net.depthwise(x, stride)))
        x = net.relu(net.norm(net.conv(x, channels, 1, bias=False)))
    net.next_block()
    x = net.reshape(net.mean(x), 1, 1, 1024)
    x = net.conv(net.reshape(x, 1, 1, 1024), 1000, 1)  # between the two: dropout, which moves data
    net.relu(net.reshape(x, 1000))  # the softmax
    return net


def resnet50(side: int = 224) -> Layers:
    net = Layers(side, side, 3)
    x = net.conv(net.pad(None, 6), 64, 7, 2, same=False)
    x = net.pool(net.pad(net.relu(net.norm(x)), 2), 3)
    for stage, (channels, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            net.next_block()
            stride = 2 if block == 0 and stage > 0 else 1
            y = net.relu(net.norm(net.conv(x, channels, 1, stride)))
            y = net.relu(net.norm(net.conv(y, channels, 3)))
            y = net.norm(net.conv(y, 4 * channels, 1))
            shortcut = net.norm(net.conv(x, 4 * channels, 1, stride)) if block == 0 else x
            x = net.relu(net.sum(shortcut, y))
    net.next_block()
    net.dense(net.mean(x), 1000)
    return net


MODELS = {"vgg19": vgg19, "unet": unet, "mobilenet": mobilenet, "resnet50": resnet50}
