KERNEL { reinterpret_cast<ulonglong2*>(told)[blockIdx.x * size_t(WORDS) + threadIdx.x] = {0, 0}; }
