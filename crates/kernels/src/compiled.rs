//! Which kernels the cases reach on a device, each once, and what counts as a fault of one that a driver has compiled. No case
//! runs: a driver without hardware is enough (`kiln selftest --compile`).

use std::collections::HashMap;

use kiln_gpu::{Caps, Shader, Told};
use rayon::prelude::*;

use crate::Kernel;
use crate::case::Level;
use crate::operation::Path;

/// A kernel that some case reaches.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The operation.
    pub operation: &'static str,
    /// The path.
    pub path: Path,
    /// Whether the device takes it by itself, and not only where the path is asked for.
    pub chosen: bool,
    /// The first case that reaches it.
    pub case: String,
    /// What to compile.
    pub shader: Shader,
}

/// A spill that is known and left, listed in the room of its operation.
#[derive(Clone, Copy, Debug)]
pub struct Excuse {
    /// How the names of the shaders begin.
    pub shader: &'static str,
    /// Most registers that may be spilled.
    pub most: f64,
    /// Why it is left.
    pub reason: &'static str,
}

/// The kernels of these operations on a device: of the small cases and of those whose sizes are worth timing, which are those of
/// models. `only_chosen` leaves out what the device does not take by itself.
pub fn variants(kernels: &[&'static Kernel], caps: &Caps, only_chosen: bool) -> Vec<Variant> {
    let wants = if only_chosen { vec![None] } else { Vec::from_iter([None].into_iter().chain(Path::ALL.map(Some))) };
    let mut found: Vec<Variant> = Vec::new();
    let mut places: HashMap<Shader, usize> = HashMap::new();
    for kernel in kernels {
        let cases: Vec<_> = [Level::Small, Level::Bench].into_iter().flat_map(kernel.cases).collect();
        let of = |case: &crate::case::Case| {
            let call = case.call();
            let choices = wants.iter().filter_map(|want| Some((*want, call.operation().pick(caps, *want).ok()?)));
            let launches = choices.flat_map(|(want, choice)| {
                let chosen = want.is_none();
                choice.launches.into_iter().map(move |launch| (choice.path, chosen, launch.shader))
            });
            launches.map(|(path, chosen, shader)| (path, chosen, case.name.clone(), shader)).collect::<Vec<_>>()
        };
        for (path, chosen, case, shader) in cases.par_iter().map(of).collect::<Vec<_>>().into_iter().flatten() {
            match places.get(&shader) {
                Some(&at) => found[at].chosen |= chosen,
                None => {
                    places.insert(shader.clone(), found.len());
                    found.push(Variant { operation: kernel.name, path, chosen, case, shader });
                }
            }
        }
    }
    found
}

/// What is excused of an operation's kernels.
pub fn excuses(operation: &str) -> &'static [Excuse] {
    match operation {
        "mul_mat_vec" => crate::mul_mat_vec::EXCUSED,
        _ => &[],
    }
}

impl Variant {
    /// Whether it must be without a fault: the device takes it by itself, or it exists for speed alone.
    pub fn is_fast(&self) -> bool {
        self.chosen || self.path != Path::Scalar
    }

    /// The excuse for a spill of it.
    pub fn excuse(&self, told: &Told) -> Option<&'static Excuse> {
        let fits = |e: &&Excuse| self.shader.name.starts_with(e.shader) && told.spilled.unwrap_or(0.0) <= e.most;
        excuses(self.operation).iter().find(fits)
    }

    /// What is wrong with it.
    pub fn fault(&self, told: &Told) -> Option<String> {
        if !told.spills() || !self.is_fast() || self.excuse(told).is_some() {
            return None;
        }
        let (spilled, scratch) = (told.spilled.unwrap_or(0.0), told.scratch.unwrap_or(0.0));
        Some(format!("{spilled} registers are spilled, {scratch} bytes of scratch memory"))
    }
}
