// Of 32 bits as far as they can be: a division of 64 takes some sixty instructions.
unsigned n = x_shape[0];
unsigned n_channels = x_shape[1];
unsigned n_groups = (n_channels + LANES - 1) / LANES;
unsigned tile = blockIdx.x / n_groups;
int thread = threadIdx.y;
int lane = threadIdx.x;
unsigned channel = blockIdx.x % n_groups * LANES + lane;
bool active = channel < n_channels;
if (!active) channel = n_channels - 1;
unsigned first = tile * TILE + thread * SAMPLES;
int inside = first >= n ? 0 : n - first < SAMPLES ? int(n - first) : SAMPLES;
const float* from = x + size_t(first) * n_channels + channel;
float* to = y + size_t(first) * n_channels + channel;
