// Sums of four elements, written out so that every variant of a kernel rounds the same way.

float sum4(vec4 x) {
    precise float sum = (x.x + x.y) + (x.z + x.w);
    return sum;
}

float dot4(vec4 a, vec4 b) { return fma(a.x, b.x, fma(a.y, b.y, fma(a.z, b.z, a.w * b.w))); }
