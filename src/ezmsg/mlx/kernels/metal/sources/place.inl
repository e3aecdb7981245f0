// Which samples this thread works on: those of one channel, in one strip of each tile.
uint n = x_shape[0];
uint n_channels = x_shape[1];
uint lane = thread_position_in_threadgroup.x;
uint lanes = threads_per_threadgroup.x;
uint strip = thread_position_in_threadgroup.y;
uint n_strips = threads_per_threadgroup.y;
uint own = strip * lanes + lane;
uint channel = threadgroup_position_in_grid.x * lanes + lane;
// A thread beyond the last channel repeats that one and writes nothing: all have to come to each barrier.
bool is_active = channel < n_channels;
channel = min(channel, n_channels - 1);
