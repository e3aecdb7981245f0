KERNEL { reinterpret_cast<ulonglong2*>(published)[blockIdx.x * size_t(WORDS) + threadIdx.x] = {0, 0}; }
