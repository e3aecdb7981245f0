"""Kernels for Metal on Vulkan: read by crosstl, which writes SPIR-V of them, and run by whatever driver there is.

The third way beside :mod:`helpers.metal_emulation` and :mod:`helpers.metal_cuda`: another reader of the language, and
with Mesa's lavapipe a machine that runs 8 threads of a threadgroup at once, on a CPU.
"""

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .metal_emulation import Launch

ASSEMBLER, VALIDATOR = shutil.which("spirv-as"), shutil.which("spirv-val")

ENVIRONMENT = "vulkan1.0"
"""crosstl writes storage buffers as SPIR-V had them up to 1.3."""


ANY = (991, 983, 977)


@functools.lru_cache(maxsize=256)
def _assembly_of_any(text: str) -> str:
    """What crosstl makes of *text*, for threadgroups of a size that stands for any other."""
    import crosstl

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.metal")
        file.write_text(text)
        options = {"threadgroup_size": ANY}
        return safe(crosstl.translate(str(file), backend="vulkan", format_output=False, source_options=options))


def assembly_of(text: str, threadgroup: tuple[int, int, int]) -> str:
    """SPIR-V of *text*: one program for each size of a threadgroup."""
    # crosstl converts to a type by one of its names alone.
    assembly = _assembly_of_any(text.replace("unsigned(", "uint("))
    # crosstl leaves it at 1 where a kernel asks for nothing but its position in the grid.
    size = " ".join(map(str, threadgroup))
    assembly = re.sub(r"^(OpExecutionMode %\d+ LocalSize) .*", rf"\1 {size}", assembly, flags=re.MULTILINE)
    for stands_for, number in zip(ANY, threadgroup, strict=True):
        assembly = re.sub(rf"(= OpConstant %\d+) {stands_for}$", rf"\1 {number}", assembly, flags=re.MULTILINE)
    return assembly


def safe(assembly: str) -> str:
    """*assembly* with operations on floats as they are written.

    For Metal that is an option of the compiler, ``math_mode``, and not in a text. Without it Mesa takes ``(a + b) - a``
    for ``b``, and the second half of each pair for zero.
    """
    operations = re.findall(r"^(%\d+) = OpF(?:Add|Sub|Mul|Div|Negate) ", assembly, re.MULTILINE)
    decorations = "".join(f"OpDecorate {result} NoContraction\n" for result in operations)
    front, first_type, rest = re.split(r"^(%\d+ = OpType\w+.*\n)", assembly, maxsplit=1, flags=re.MULTILINE)
    return front + decorations + first_type + rest


@functools.lru_cache(maxsize=1024)
def spirv_of(assembly: str) -> bytes:
    """Machine-independent code of *assembly*; AssertionError where it is none, by the validator of SPIRV-Tools."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.spvasm"), Path(folder, "kernel.spv")
        source.write_text(assembly)
        for command in ([ASSEMBLER, source, "-o", target], [VALIDATOR, target]):
            command = [*command, "--target-env", ENVIRONMENT]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True)
            assert not done.returncode, f"not valid: {(done.stderr + done.stdout)[:1000]}"
        return target.read_bytes()


@functools.cache
def device() -> "Device | None":
    """The first one that Vulkan has; None where there is none."""
    try:
        return Device()
    except (ImportError, OSError, IndexError):
        return None


class Device:
    """A device of Vulkan with one queue. Everything is made anew for each launch but programs."""

    def __init__(self) -> None:
        import vulkan as vk

        self.vk = vk
        application = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 1, 0))
        self._instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=application), None)
        physical = vk.vkEnumeratePhysicalDevices(self._instance)[0]
        self.name = vk.vkGetPhysicalDeviceProperties(physical).deviceName
        families = vk.vkGetPhysicalDeviceQueueFamilyProperties(physical)
        family = next(i for i, each in enumerate(families) if each.queueFlags & vk.VK_QUEUE_COMPUTE_BIT)
        queue = vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, queueCount=1, pQueuePriorities=[1.0])
        features = vk.VkPhysicalDeviceFeatures(shaderInt64=vk.VK_TRUE)
        info = vk.VkDeviceCreateInfo(pQueueCreateInfos=[queue], pEnabledFeatures=features)
        self._device = vk.vkCreateDevice(physical, info, None)
        self._queue = vk.vkGetDeviceQueue(self._device, family, 0)
        self._pool = vk.vkCreateCommandPool(
            self._device,
            vk.VkCommandPoolCreateInfo(
                flags=vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT, queueFamilyIndex=family
            ),
            None,
        )
        memory = vk.vkGetPhysicalDeviceMemoryProperties(physical)
        wanted = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
        self._memory_type = next(
            i for i in range(memory.memoryTypeCount) if memory.memoryTypes[i].propertyFlags & wanted == wanted
        )

    @functools.lru_cache(maxsize=512)  # noqa: B019 there is one device, for as long as the process lives
    def _pipeline(self, code: bytes, name: str, n_buffers: int) -> tuple:
        vk, device = self.vk, self._device
        module = vk.vkCreateShaderModule(device, vk.VkShaderModuleCreateInfo(codeSize=len(code), pCode=code), None)
        bindings = [
            vk.VkDescriptorSetLayoutBinding(
                binding=i,
                descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                descriptorCount=1,
                stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT,
            )
            for i in range(n_buffers)
        ]
        set_layout = vk.vkCreateDescriptorSetLayout(
            device, vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings), None
        )
        layout = vk.vkCreatePipelineLayout(device, vk.VkPipelineLayoutCreateInfo(pSetLayouts=[set_layout]), None)
        stage = vk.VkPipelineShaderStageCreateInfo(stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module, pName=name)
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout)
        pipeline = vk.vkCreateComputePipelines(device, vk.VK_NULL_HANDLE, 1, [info], None)
        pipeline = pipeline[0] if isinstance(pipeline, list | tuple) or not isinstance(pipeline, int) else pipeline
        size = vk.VkDescriptorPoolSize(type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=n_buffers)
        pool = vk.vkCreateDescriptorPool(device, vk.VkDescriptorPoolCreateInfo(maxSets=1, pPoolSizes=[size]), None)
        (descriptors,) = vk.vkAllocateDescriptorSets(
            device, vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[set_layout])
        )
        return pipeline, layout, descriptors

    def _buffer(self, content: np.ndarray) -> tuple:
        vk, device = self.vk, self._device
        info = vk.VkBufferCreateInfo(size=content.nbytes, usage=vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT)
        buffer = vk.vkCreateBuffer(device, info, None)
        needs = vk.vkGetBufferMemoryRequirements(device, buffer)
        memory = vk.vkAllocateMemory(
            device, vk.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=self._memory_type), None
        )
        vk.vkBindBufferMemory(device, buffer, memory, 0)
        window = np.frombuffer(vk.vkMapMemory(device, memory, 0, content.nbytes, 0), content.dtype)
        window[:] = content.reshape(-1)
        return buffer, memory, window

    def run(self, code: bytes, name: str, groups: tuple[int, int, int], arrays: Sequence[np.ndarray]) -> None:
        """Run a program once. *arrays* are all of its buffers; they have afterwards what it made of them."""
        vk, device = self.vk, self._device
        pipeline, layout, descriptors = self._pipeline(code, name, len(arrays))
        buffers = [self._buffer(array) for array in arrays]
        writes = [
            vk.VkWriteDescriptorSet(
                dstSet=descriptors,
                dstBinding=i,
                descriptorCount=1,
                descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                pBufferInfo=[vk.VkDescriptorBufferInfo(buffer=buffer, offset=0, range=array.nbytes)],
            )
            for i, ((buffer, _, _), array) in enumerate(zip(buffers, arrays, strict=True))
        ]
        vk.vkUpdateDescriptorSets(device, len(writes), writes, 0, None)
        (commands,) = vk.vkAllocateCommandBuffers(
            device,
            vk.VkCommandBufferAllocateInfo(
                commandPool=self._pool, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=1
            ),
        )
        vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo())
        vk.vkCmdBindPipeline(commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, pipeline)
        vk.vkCmdBindDescriptorSets(commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, layout, 0, 1, [descriptors], 0, None)
        vk.vkCmdDispatch(commands, *groups)
        vk.vkEndCommandBuffer(commands)
        vk.vkQueueSubmit(self._queue, 1, [vk.VkSubmitInfo(pCommandBuffers=[commands])], vk.VK_NULL_HANDLE)
        vk.vkQueueWaitIdle(self._queue)
        vk.vkFreeCommandBuffers(device, self._pool, 1, [commands])
        for (buffer, memory, window), array in zip(buffers, arrays, strict=True):
            array[...] = window.reshape(array.shape)
            vk.vkUnmapMemory(device, memory)
            vk.vkDestroyBuffer(device, buffer, None)
            vk.vkFreeMemory(device, memory, None)


def run(launch: Launch, inputs: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run *launch* on Vulkan."""
    assert all(n % m == 0 for n, m in zip(launch.grid, launch.threadgroup, strict=True)), "no smaller last groups"
    code = spirv_of(assembly_of(launch.with_constants, launch.threadgroup))
    groups = tuple(n // m for n, m in zip(launch.grid, launch.threadgroup, strict=True))
    # SPIR-V has no bool in memory, and crosstl writes a word for each.
    given = [array.astype(np.uint32 if array.dtype == bool else array.dtype) for array in launch.buffers(inputs)]
    found = [np.full(result.shape, 99, np.uint32) if result.dtype == bool else result for result in results]
    device().run(code, launch.name, groups, [*given, *found])
    for result, words in zip(results, found, strict=True):
        if result.dtype == bool:
            result.view(np.uint8)[...] = words
