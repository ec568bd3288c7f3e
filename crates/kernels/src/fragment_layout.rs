//! Opens a device with Kiln's kernels and finds its fragment layout: which components of a cooperative matrix each lane holds. Vulkan leaves
//! that to the driver, so a small kernel probes it once for each driver build. Kernels that write fragments themselves know a few layouts
//! (`FragmentLayout`); other devices use kernels that go through shared memory.

use std::sync::Arc;

use kiln_gpu::{
    Adapter, Address, Cache, Caps, Component, CoopmatShape, Cost, Device, Dispatch, Error, FragmentLayout, Groups,
    Instance, MemoryKind, Recorder, Shader, Sources, Span, SubgroupRequest,
};

/// The probe result is cached under this name.
const FACT: &str = "matrix-order-and-sums";
const FACT_OF_BFLOAT16: &str = "matrix-order-of-bfloat16";
/// What a place is before the kernel has written it.
const UNWRITTEN: u32 = u32::MAX;

kiln_gpu::params! {
    struct Params { places: Address }
}

/// Opens a device with Kiln's kernels.
pub fn open(instance: &Arc<Instance>, adapter: &Adapter, cache: Cache) -> Result<Arc<Device>, Error> {
    let mut device = Device::open(instance, adapter, Sources::new(crate::SOURCES), cache)?;
    let found = fragment_layout(&device);
    let (order, sums_as_left) = found.map_or((None, false), |(order, sums)| (Some(order), sums));
    let bfloat16 = order.is_some_and(|order| bfloat16_lies_so(&device, order));
    device.note_fragment_layout(order, sums_as_left, bfloat16);
    Ok(device)
}

/// The layout of a device, if it is a known one, and whether accumulators have the layout of A.
fn fragment_layout(device: &Arc<Device>) -> Option<(FragmentLayout, bool)> {
    let caps = &device.adapter.caps;
    let shape = *caps.coopmat_shape(Component::F16, Component::F32).filter(|_| caps.subgroups.full)?;
    let left_out = kiln_system::environment::text("KILN_DISABLE").unwrap_or_default();
    if left_out.split(',').any(|name| ["fragment", "lanes"].contains(&name.trim())) {
        return None;
    }
    let places = places_of(device, &shape, FACT)?;
    let order = known(&places, &shape, caps);
    log::debug!("matrices of {}x{}x{}: {order:?}", shape.m, shape.n, shape.k);
    order.map(|order| (order, sums_as_left(order, &places, &shape)))
}

/// Whether bfloat16 matrices have the layout of f16 ones.
fn bfloat16_lies_so(device: &Arc<Device>, order: FragmentLayout) -> bool {
    let caps = &device.adapter.caps;
    let shape = caps.coopmat_shape(Component::Bf16, Component::F32).filter(|_| caps.bfloat16).copied();
    let places = shape.and_then(|shape| places_of(device, &shape, FACT_OF_BFLOAT16).map(|places| (shape, places)));
    places.is_some_and(|(shape, places)| is_of(order, &places, &shape, caps))
}

/// The positions of all components of a shape, from the cache or from the probe.
fn places_of(device: &Arc<Device>, shape: &CoopmatShape, fact: &str) -> Option<Vec<u32>> {
    let kept = device.recall(fact).map(|bytes| words(&bytes));
    kept.or_else(|| {
        let found = find(device, shape).inspect_err(|e| log::warn!("the fragment layout was not found: {e}"));
        let places = found.ok()?;
        device.remember(fact, &places.iter().flat_map(|place| place.to_le_bytes()).collect::<Vec<u8>>());
        Some(places)
    })
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect()
}

/// The kernel that looks at a shape.
pub(crate) fn shader(caps: &Caps, shape: &CoopmatShape) -> Shader {
    Shader::new("probe.fragment_layout", "probes/fragment_layout.comp", Params::glsl())
        .define("SG", caps.subgroups.size)
        .define("M", shape.m)
        .define("N", shape.n)
        .define("K", shape.k)
        .define("HALF", u32::from(shape.a == Component::F16))
        .subgroup(SubgroupRequest::Full)
}

/// Asks the device: places of all components of the A fragment, lane by lane, then of the right one and of sums.
fn find(device: &Arc<Device>, shape: &CoopmatShape) -> Result<Vec<u32>, Error> {
    let bytes = 4 * u64::from((shape.m + shape.n) * shape.k + shape.m * shape.n);
    let buffer = device.allocate(MemoryKind::Device, bytes)?;
    let pipeline = device.pipeline(&shader(&device.adapter.caps, shape))?;
    let mut recorder = Recorder::new(device)?;
    recorder.fill((&buffer, 0), bytes, UNWRITTEN)?;
    recorder.dispatch(Dispatch {
        label: "order",
        pipeline: &pipeline,
        params: &Params { places: buffer.address() }.bytes(),
        groups: Groups::Direct([1, 1, 1]),
        reads: &[],
        writes: &[Span { start: buffer.address(), bytes }],
        early: &[],
        cost: Cost::default(),
    })?;
    recorder.finish()?.run()?;
    let mut places = vec![0; bytes as usize];
    device.read(&buffer, 0, &mut places)?;
    Ok(words(&places))
}

/// The number that `fragment_layout.glsl` knows an order by.
pub(crate) fn number(order: FragmentLayout) -> u32 {
    match order {
        FragmentLayout::Mma16x8 => 0,
        FragmentLayout::Row8 => 1,
    }
}

/// Rows (columns), lanes and elements of k of the matrices of an order.
pub(crate) fn extents(order: FragmentLayout) -> [u32; 3] {
    match order {
        FragmentLayout::Mma16x8 => [16, 32, 16],
        FragmentLayout::Row8 => [8, 8, 8],
    }
}

/// The row (column) of component `i` of a lane, and a number that stands for its element of k. `fragment_layout.glsl` says
/// the same.
fn row_and_k(order: FragmentLayout, lane: u32, i: u32) -> (u32, u32) {
    match order {
        FragmentLayout::Mma16x8 => (lane / 4 + i / 4 * 8, lane % 4 * 4 + i % 4),
        FragmentLayout::Row8 => (i, lane),
    }
}

/// The order that these places are of, if it is a known one.
fn known(places: &[u32], shape: &CoopmatShape, caps: &Caps) -> Option<FragmentLayout> {
    [FragmentLayout::Mma16x8, FragmentLayout::Row8].into_iter().find(|&order| is_of(order, places, shape, caps))
}

fn is_of(order: FragmentLayout, places: &[u32], shape: &CoopmatShape, caps: &Caps) -> bool {
    let [rows, lanes, k] = extents(order);
    if [shape.m, shape.n, shape.k, caps.subgroups.size] != [rows, rows, k, lanes]
        || places.len() != (2 * rows * k + rows * rows) as usize
    {
        return false;
    }
    let places = &places[..2 * (rows * k) as usize];
    let each = rows * k / lanes;
    // Which element of k a number stands for: the first component says it, all others must agree.
    let mut elements = vec![None; k as usize];
    let mut seen = vec![0u8; places.len()];
    for (at, &place) in (0u32..).zip(places) {
        let (right, at) = (at >= rows * k, at % (rows * k));
        let (lane, i) = (at / each, at % each);
        let (row, number) = row_and_k(order, lane, i);
        let (got_row, element) = if right { (place % rows, place / rows) } else { (place / k, place % k) };
        if place >= rows * k || got_row != row {
            return false;
        }
        seen[(u32::from(right) * rows * k + place) as usize] += 1;
        let expected = elements[number as usize].get_or_insert(element);
        if *expected != element {
            return false;
        }
    }
    seen.iter().all(|&times| times == 1)
}

/// Whether accumulator and A fragments share a layout, so that P can feed P * V without leaving registers. K must have the usual order.
fn sums_as_left(order: FragmentLayout, places: &[u32], shape: &CoopmatShape) -> bool {
    let [rows, lanes, k] = extents(order);
    let each = rows * k / lanes;
    let usual = |at: u32| {
        let (row, number) = row_and_k(order, at / each, at % each);
        let element = match order {
            FragmentLayout::Mma16x8 => number / 4 * 2 + number % 2 + number % 4 / 2 * 8,
            FragmentLayout::Row8 => number,
        };
        row * k + element
    };
    let (left, others) = places.split_at((shape.m * shape.k) as usize);
    let sums = &others[(shape.k * shape.n) as usize..];
    shape.n == shape.k && sums == left && (0u32..).zip(left).all(|(at, place)| *place == usual(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an NVIDIA H200 answers (driver 580.159): pairs of neighbours, eight apart.
    fn answer() -> Vec<u32> {
        let k = |lane: u32, j: u32| lane % 4 * 2 + j % 2 + j / 2 * 8;
        let of = |place: fn(u32, u32) -> u32| {
            (0..32u32).flat_map(move |lane| (0..8u32).map(move |i| place(lane / 4 + i / 4 * 8, k(lane, i % 4))))
        };
        let left = || of(|row, k| row * 16 + k);
        left().chain(of(|column, k| k * 16 + column)).chain(left()).collect()
    }

    /// What Mesa's software GPU answers: a lane has a column of the A fragment and a row of the right one.
    #[test]
    fn slices_are_known() {
        let nvidia = Caps::example_nvidia();
        let shape = CoopmatShape { m: 8, n: 8, k: 8, ..nvidia.coopmat[1] };
        let caps = Caps { subgroups: kiln_gpu::Subgroups { size: 8, ..nvidia.subgroups.clone() }, ..nvidia };
        let left = || (0..64).map(|at| at % 8 * 8 + at / 8);
        let all = |sums: Vec<u32>| left().chain(0..64).chain(sums).collect::<Vec<u32>>();
        assert_eq!(known(&all(left().collect()), &shape, &caps), Some(FragmentLayout::Row8));
        assert!(sums_as_left(FragmentLayout::Row8, &all(left().collect()), &shape));
        assert!(!sums_as_left(FragmentLayout::Row8, &all((0..64).collect()), &shape));
        assert_eq!(known(&(0..64).chain(0..64).chain(0..64).collect::<Vec<u32>>(), &shape, &caps), None);
    }

    #[test]
    fn known_orders_are_told_from_others() {
        let caps = Caps::example_nvidia();
        let shape = *caps.coopmat_shape(Component::F16, Component::F32).unwrap();
        let order = |places: &[u32]| known(places, &shape, &caps);
        assert_eq!(order(&answer()), Some(FragmentLayout::Mma16x8));
        // Elements of k that differ between the operands, an element that two lanes hold, one that no lane wrote.
        let mut swapped = answer();
        swapped[256..512].chunks_exact_mut(4).for_each(|quad| quad.swap(0, 1));
        let mut twice = answer();
        twice[8] = twice[0];
        let mut unwritten = answer();
        unwritten[500] = UNWRITTEN;
        assert_eq!([order(&swapped), order(&twice), order(&unwritten), order(&answer()[1..])], [None; 4]);
        assert!(sums_as_left(FragmentLayout::Mma16x8, &answer(), &shape));
        // Elements of k that both operands agree on, but in an order of their own.
        let mut turned = answer();
        turned.chunks_exact_mut(4).for_each(|quad| quad.reverse());
        assert_eq!(
            (order(&turned), sums_as_left(FragmentLayout::Mma16x8, &turned, &shape)),
            (Some(FragmentLayout::Mma16x8), false)
        );
        let smaller = Caps { subgroups: kiln_gpu::Subgroups { size: 16, ..caps.subgroups.clone() }, ..caps.clone() };
        assert_eq!(known(&answer(), &shape, &smaller), None);
    }
}
