// Crossings of one channel, sample by sample: each decides what the next may be. What is common to CUDA and Metal; see
// ezmsg.mlx.kernels.crossings for the rows of a state and what the scales are.

unsigned n = x_shape[0];
unsigned n_channels = x_shape[1];
float alpha = table[0];
float beta = table[1];
float refractory = table[2];
float shortest = table[3];
int window = int(table[4]);
bool at_peak = table[5] > 0.0f;
unsigned slots = unsigned(table[6]);
float threshold = table[8 + channel];
float sign = threshold >= 0.0f ? 1.0f : -1.0f;
int delay = window - 1;

float status = zi[channel];
float left = zi[n_channels + channel];
size_t row = size_t(2) * n_channels + channel;

Pair first = {0.0f, 0.0f};
Pair second = {0.0f, 0.0f};
Pair weight = {0.0f, 0.0f};
if (SCALE != NONE) {
  first = {zi[row], zi[row + n_channels]};
  row += size_t(2) * n_channels;
  if (SCALE == ZSCORE) {
    second = {zi[row], zi[row + n_channels]};
    row += size_t(2) * n_channels;
  }
  weight = {zi[row], zi[row + n_channels]};
  row += size_t(2) * n_channels;
}

float age = 0.0f;
float peak = 0.0f;
float value = 0.0f;
float offset = 0.0f;
if (HAS_WINDOW) {
  age = zi[row];
  peak = zi[row + n_channels];
  value = zi[row + size_t(2) * n_channels];
  offset = zi[row + size_t(3) * n_channels];
}
size_t pending = row + size_t(4) * n_channels;

// Results begin as what is known of them already.
unsigned found = 0;
if (HAS_WINDOW) {
  unsigned n_rows = n + unsigned(delay);
  for (unsigned i = 0; i < n_rows; ++i) {
    float held = i < unsigned(delay) ? zi[pending + size_t(i) * n_channels] : 0.0f;
    if (i >= n) {
      zf[pending + size_t(i - n) * n_channels] = held;
    } else if (!IS_SPARSE) {
      y[size_t(i) * n_channels + channel] = held;
    } else if (held != 0.0f) {
      y[size_t(found) * n_channels + channel] = float(i);
      if (GIVES_VALUES) y[size_t(slots + found) * n_channels + channel] = held;
      ++found;
    }
  }
}

for (unsigned start = 0; start < n; start += AHEAD) {
  // Asked for together, so that none waits for the one before.
  float samples[AHEAD];
  UNROLL
  for (unsigned i = 0; i < AHEAD; ++i) {
    samples[i] = start + i < n ? x[size_t(start + i) * n_channels + channel] : 0.0f;
  }
  UNROLL
  for (unsigned i = 0; i < AHEAD; ++i) {
    unsigned t = start + i;
    if (t < n) {
      float sample = samples[i];
      float compared = sample;
      float bound = threshold;
      bool is_compared = true;
      if (SCALE != NONE) {
        float size = magnitude(sample);
        is_compared = size <= LARGEST_SCALED;
        if (is_compared) {
          float before = weight.high;
          weight = moved(weight, alpha * ((1.0f - weight.high) - weight.low));
          if (SCALE == ZSCORE) {
            float share = alpha / weight.high;
            float rest = beta * before / weight.high;
            float delta = (sample - first.high) - first.low;
            float spread = delta * (delta * (share * rest));
            if (share <= 0.5f) {
              first = moved(first, share * delta);
              second = moved(second, spread - share * second.high);
            } else {
              Pair own = {sample, 0.0f};
              Pair nothing = {0.0f, 0.0f};
              first = moved(own, -rest * delta);
              second = moved(nothing, rest * second.high + spread);
            }
            float least = RESOLUTION * first.high;
            bool varies = second.high > SMALLEST_VARIANCE && second.high > least * least;
            compared = varies ? rest * delta / root(second.high) : 0.0f;
          } else if (SCALE == RMS) {
            Pair average = moved(first, alpha * (sample * sample));
            first = moved(average, -alpha * average.high);
            bound = threshold * root(average.high / weight.high);
          } else {
            float gain = STEP * (alpha / weight.high) * (1.0f + EAGERNESS * (1.0f - weight.high));
            gain = gain < 0.5f ? gain : 0.5f;
            if (first.high == 0.0f) {
              first.high = size;
            } else if (size != first.high) {
              first = moved(first, size > first.high ? gain * first.high : -gain * first.high);
            }
            bound = threshold * (NORMAL * first.high);
          }
        }
      }
      bool is_over = is_compared && compared * sign >= bound * sign;
      bool begins = is_over && status == UNDER && left == 0.0f;
      status = is_over ? OVER : UNDER;
      left = begins ? refractory : left > 0.0f ? left - 1.0f : 0.0f;
      if (!HAS_WINDOW) {
        if (!IS_SPARSE) {
          y[size_t(t) * n_channels + channel] = begins;
        } else if (begins) {
          y[size_t(found) * n_channels + channel] = float(t);
          ++found;
        }
      } else {
        if (begins) {
          age = 1.0f;
          peak = compared;
          value = sample;
          offset = 0.0f;
        } else if (age > 0.0f && is_over) {
          if (compared * sign > peak * sign) {
            peak = compared;
            value = sample;
            offset = age;
          }
          age += 1.0f;
        }
        if (age > 0.0f && (!is_over || age >= float(window))) {
          if (is_over || age >= shortest) {
            int at = int(t) + delay - int(age) + (is_over ? 1 : 0) + (at_peak ? int(offset) : 0);
            float result = GIVES_VALUES ? value : 1.0f;
            if (at >= int(n)) {
              zf[pending + size_t(at - int(n)) * n_channels] = result;
            } else if (!IS_SPARSE) {
              y[size_t(at) * n_channels + channel] = result;
            } else {
              y[size_t(found) * n_channels + channel] = float(at);
              if (GIVES_VALUES) y[size_t(slots + found) * n_channels + channel] = result;
              ++found;
            }
          }
          age = 0.0f;
        }
      }
    }
  }
}

if (IS_SPARSE) {
  for (; found < slots; ++found) {
    y[size_t(found) * n_channels + channel] = -1.0f;
    if (GIVES_VALUES) y[size_t(slots + found) * n_channels + channel] = 0.0f;
  }
}
zf[channel] = status;
zf[n_channels + channel] = left;
row = size_t(2) * n_channels + channel;
if (SCALE != NONE) {
  zf[row] = first.high;
  zf[row + n_channels] = first.low;
  row += size_t(2) * n_channels;
  if (SCALE == ZSCORE) {
    zf[row] = second.high;
    zf[row + n_channels] = second.low;
    row += size_t(2) * n_channels;
  }
  zf[row] = weight.high;
  zf[row + n_channels] = weight.low;
  row += size_t(2) * n_channels;
}
if (HAS_WINDOW) {
  zf[row] = age;
  zf[row + n_channels] = peak;
  zf[row + size_t(2) * n_channels] = value;
  zf[row + size_t(3) * n_channels] = offset;
}
