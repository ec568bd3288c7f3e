// Sorts pairs (key, index) in shared memory, keys ascending, equal keys by index. All pairs differ, so every sorting
// network gives the same order. TILE is the number of pairs, a power of two; WG the number of threads.

shared uvec2 tile[TILE];

// Sorts behind every pair of a row.
const uvec2 NOTHING = uvec2(0xffffffffu);

bool before(uvec2 a, uvec2 b) { return a.x < b.x || (a.x == b.x && a.y < b.y); }

// The bitonic network. Starts and ends with a barrier; every thread of the workgroup must call it.
void sort_tile() {
    for (uint size = 2; size <= TILE; size <<= 1) {
        for (uint gap = size >> 1; gap > 0; gap >>= 1) {
            barrier();
            for (uint t = gl_LocalInvocationID.x; t < TILE / 2; t += WG) {
                uint low = 2 * t - (t & (gap - 1));
                uint high = low + gap;
                uvec2 a = tile[low], b = tile[high];
                bool ascending = (low & size) == 0;
                if (before(b, a) == ascending) {
                    tile[low] = b;
                    tile[high] = a;
                }
            }
        }
    }
    barrier();
}
