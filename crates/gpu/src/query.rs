//! Reads a physical device's features and properties into [`Caps`].

use vulkanalia::prelude::v1_2::*;

use crate::caps::{Caps, Component, Coopmat2, CoopmatShape, FlexibleShape, IntDot, Limits, Scope, Subgroups};

/// The feature structs Kiln looks at; what is offered is also what gets enabled.
#[derive(Clone, Default)]
pub(crate) struct Features {
    pub(crate) core: vk::PhysicalDeviceFeatures,
    pub(crate) v11: vk::PhysicalDeviceVulkan11Features,
    pub(crate) v12: vk::PhysicalDeviceVulkan12Features,
    pub(crate) v13: vk::PhysicalDeviceVulkan13Features,
    pub(crate) coopmat: vk::PhysicalDeviceCooperativeMatrixFeaturesKHR,
    pub(crate) coopmat2: vk::PhysicalDeviceCooperativeMatrix2FeaturesNV,
    pub(crate) bfloat16: vk::PhysicalDeviceShaderBfloat16FeaturesKHR,
}

/// Whether an extension is in a device's list.
pub(crate) fn offers_extension(offered: &[String], extension: &vk::Extension) -> bool {
    offered.iter().any(|name| name.as_bytes() == extension.name.as_cstr().to_bytes())
}

/// Which optional structs may be chained.
#[derive(Clone, Copy)]
pub(crate) struct Offers {
    pub(crate) v13: bool,
    pub(crate) coopmat: bool,
    pub(crate) coopmat2: bool,
    pub(crate) bfloat16: bool,
}

impl Offers {
    pub(crate) fn of(api_version: u32, extensions: &[String]) -> Offers {
        let has = |e: &vk::Extension| offers_extension(extensions, e);
        Offers {
            v13: vulkanalia::Version::from(api_version) >= vulkanalia::Version::V1_3_0,
            coopmat: has(&vk::KHR_COOPERATIVE_MATRIX_EXTENSION),
            coopmat2: has(&vk::NV_COOPERATIVE_MATRIX2_EXTENSION),
            bfloat16: has(&vk::KHR_SHADER_BFLOAT16_EXTENSION),
        }
    }
}

pub(crate) fn features(raw: &vulkanalia::Instance, physical: vk::PhysicalDevice, offers: Offers) -> Features {
    let mut f = Features::default();
    let mut chain = vk::PhysicalDeviceFeatures2::builder().push_next(&mut f.v11).push_next(&mut f.v12);
    if offers.v13 {
        chain = chain.push_next(&mut f.v13);
    }
    if offers.coopmat {
        chain = chain.push_next(&mut f.coopmat);
    }
    if offers.coopmat2 {
        chain = chain.push_next(&mut f.coopmat2);
    }
    if offers.bfloat16 {
        chain = chain.push_next(&mut f.bfloat16);
    }
    // SAFETY: only structs of offered versions and extensions are chained, all alive during the call.
    unsafe { raw.get_physical_device_features2(physical, &mut chain) };
    f.core = chain.features;
    // The chain is gone with this function; a caller that chains the structs anew must not find its old pointers.
    f.v11.next = std::ptr::null_mut();
    f.v12.next = std::ptr::null_mut();
    f.v13.next = std::ptr::null_mut();
    f.coopmat.next = std::ptr::null_mut();
    f.coopmat2.next = std::ptr::null_mut();
    f.bfloat16.next = std::ptr::null_mut();
    f
}

/// The capabilities, and whether buffer addresses and timeline semaphores may be used at all.
pub(crate) fn caps(
    raw: &vulkanalia::Instance,
    physical: vk::PhysicalDevice,
    core: &vk::PhysicalDeviceProperties,
    extensions: &[String],
) -> (Caps, bool) {
    let offers = Offers::of(core.api_version, extensions);
    let has = |e: &vk::Extension| offers_extension(extensions, e);
    let f = features(raw, physical, offers);

    let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
    let mut v13 = vk::PhysicalDeviceVulkan13Properties::default();
    let mut coopmat2 = vk::PhysicalDeviceCooperativeMatrix2PropertiesNV::default();
    let mut sm = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
    let mut amd = vk::PhysicalDeviceShaderCoreProperties2AMD::default();
    let mut chain = vk::PhysicalDeviceProperties2::builder().push_next(&mut v11);
    if offers.v13 {
        chain = chain.push_next(&mut v13);
    }
    if offers.coopmat2 {
        chain = chain.push_next(&mut coopmat2);
    }
    if has(&vk::NV_SHADER_SM_BUILTINS_EXTENSION) {
        chain = chain.push_next(&mut sm);
    }
    if has(&vk::AMD_SHADER_CORE_PROPERTIES2_EXTENSION) {
        chain = chain.push_next(&mut amd);
    }
    // SAFETY: as for the features.
    unsafe { raw.get_physical_device_properties2(physical, &mut chain) };

    let on = |bit: vk::Bool32| bit == vk::TRUE;
    let limits = core.limits;
    let caps = Caps {
        subgroups: subgroups(&v11, &v13, &f, offers),
        limits: Limits {
            max_workgroup_count: limits.max_compute_work_group_count,
            max_workgroup_size: limits.max_compute_work_group_size,
            max_workgroup_invocations: limits.max_compute_work_group_invocations,
            max_shared_bytes: limits.max_compute_shared_memory_size,
            max_push_bytes: limits.max_push_constants_size,
            max_buffer_bytes: if offers.v13 { v13.max_buffer_size } else { v11.max_memory_allocation_size },
            max_allocation_bytes: v11.max_memory_allocation_size,
            timestamp_femtoseconds: (f64::from(limits.timestamp_period) * 1e6).round() as u64,
        },
        storage_8bit: on(f.v12.storage_buffer_8bit_access),
        storage_16bit: on(f.v11.storage_buffer_16bit_access),
        float16: on(f.v12.shader_float16),
        int8: on(f.v12.shader_int8),
        int16: on(f.core.shader_int16),
        int64: on(f.core.shader_int64),
        float64: on(f.core.shader_float64),
        bfloat16: on(f.bfloat16.shader_b_float16_type),
        int_dot: match (
            on(f.v13.shader_integer_dot_product),
            on(v13.integer_dot_product4x_8bit_packed_signed_accelerated),
        ) {
            (false, _) => IntDot::None,
            (true, false) => IntDot::Emulated,
            (true, true) => IntDot::Accelerated,
        },
        memory_model: on(f.v12.vulkan_memory_model),
        coopmat: if on(f.coopmat.cooperative_matrix) { coopmat_shapes(raw, physical) } else { Vec::new() },
        fragment_layout: None,
        accumulator_is_a_fragment: false,
        bf16_shares_layout: false,
        coopmat2: if offers.coopmat2 { coopmat2_caps(raw, physical, &f, &coopmat2) } else { Coopmat2::default() },
        cores: [sm.shader_sm_count, amd.active_compute_unit_count].into_iter().find(|n| *n > 0),
        // A software GPU runs one dispatch after the other anyway.
        dependent_launch: on(f.v12.vulkan_memory_model) && core.device_type != vk::PhysicalDeviceType::CPU,
        is_cpu: core.device_type == vk::PhysicalDeviceType::CPU,
        tuned: None,
    };
    (caps, on(f.v12.buffer_device_address) && on(f.v12.timeline_semaphore))
}

fn subgroups(
    v11: &vk::PhysicalDeviceVulkan11Properties,
    v13: &vk::PhysicalDeviceVulkan13Properties,
    f: &Features,
    offers: Offers,
) -> Subgroups {
    use vk::SubgroupFeatureFlags as Group;
    let compute = v11.subgroup_supported_stages.contains(vk::ShaderStageFlags::COMPUTE);
    let does = |group| compute && v11.subgroup_supported_operations.contains(group);
    let sized = offers.v13 && v13.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE);
    Subgroups {
        size: v11.subgroup_size,
        min_size: if offers.v13 { v13.min_subgroup_size } else { v11.subgroup_size },
        max_size: if offers.v13 { v13.max_subgroup_size } else { v11.subgroup_size },
        size_control: sized && f.v13.subgroup_size_control == vk::TRUE,
        full: offers.v13 && f.v13.compute_full_subgroups == vk::TRUE,
        arithmetic: does(Group::ARITHMETIC),
        shuffle: does(Group::SHUFFLE),
        ballot: does(Group::BALLOT),
        vote: does(Group::VOTE),
        clustered: does(Group::CLUSTERED),
    }
}

fn component(ty: vk::ComponentTypeKHR) -> Component {
    match ty {
        vk::ComponentTypeKHR::FLOAT16 => Component::F16,
        vk::ComponentTypeKHR::FLOAT32 => Component::F32,
        vk::ComponentTypeKHR::FLOAT64 => Component::F64,
        vk::ComponentTypeKHR::BFLOAT16 => Component::Bf16,
        vk::ComponentTypeKHR::SINT8 => Component::I8,
        vk::ComponentTypeKHR::SINT16 => Component::I16,
        vk::ComponentTypeKHR::SINT32 => Component::I32,
        vk::ComponentTypeKHR::SINT64 => Component::I64,
        vk::ComponentTypeKHR::UINT8 => Component::U8,
        vk::ComponentTypeKHR::UINT16 => Component::U16,
        vk::ComponentTypeKHR::UINT32 => Component::U32,
        vk::ComponentTypeKHR::UINT64 => Component::U64,
        other => Component::Other(other.as_raw()),
    }
}

fn scope(scope: vk::ScopeKHR) -> Scope {
    if scope == vk::ScopeKHR::WORKGROUP { Scope::Workgroup } else { Scope::Subgroup }
}

/// Two-call enumeration with initialised structs: the binding's own wrapper leaves `sType` to chance.
fn enumerate<T: Clone + Default>(call: impl Fn(*mut u32, *mut T) -> vk::Result) -> Vec<T> {
    let mut count = 0;
    if call(&mut count, std::ptr::null_mut()) < vk::Result::SUCCESS {
        return Vec::new();
    }
    let mut rows = vec![T::default(); count as usize];
    if call(&mut count, rows.as_mut_ptr()) < vk::Result::SUCCESS {
        return Vec::new();
    }
    rows.truncate(count as usize);
    rows
}

fn coopmat_shapes(raw: &vulkanalia::Instance, physical: vk::PhysicalDevice) -> Vec<CoopmatShape> {
    let call = raw.commands().get_physical_device_cooperative_matrix_properties_khr;
    // SAFETY: the extension is offered; `enumerate` passes null or an array of the counted length.
    let rows = enumerate(|n, out: *mut vk::CooperativeMatrixPropertiesKHR| unsafe { call(physical, n, out) });
    rows.iter()
        .map(|r| CoopmatShape {
            m: r.m_size,
            n: r.n_size,
            k: r.k_size,
            a: component(r.a_type),
            b: component(r.b_type),
            c: component(r.c_type),
            result: component(r.result_type),
            saturating: r.saturating_accumulation == vk::TRUE,
            scope: scope(r.scope),
        })
        .collect()
}

fn coopmat2_caps(
    raw: &vulkanalia::Instance,
    physical: vk::PhysicalDevice,
    f: &Features,
    properties: &vk::PhysicalDeviceCooperativeMatrix2PropertiesNV,
) -> Coopmat2 {
    let call = raw.commands().get_physical_device_cooperative_matrix_flexible_dimensions_properties_nv;
    // SAFETY: the extension is offered; `enumerate` passes null or an array of the counted length.
    let rows =
        enumerate(|n, out: *mut vk::CooperativeMatrixFlexibleDimensionsPropertiesNV| unsafe { call(physical, n, out) });
    let shapes = rows
        .iter()
        .map(|r| FlexibleShape {
            m: r.m_granularity,
            n: r.n_granularity,
            k: r.k_granularity,
            a: component(r.a_type),
            b: component(r.b_type),
            c: component(r.c_type),
            result: component(r.result_type),
            saturating: r.saturating_accumulation == vk::TRUE,
            scope: scope(r.scope),
            workgroup: r.workgroup_invocations,
        })
        .collect();
    let on = |bit: vk::Bool32| bit == vk::TRUE;
    Coopmat2 {
        workgroup_scope: on(f.coopmat2.cooperative_matrix_workgroup_scope),
        flexible_dimensions: on(f.coopmat2.cooperative_matrix_flexible_dimensions),
        reductions: on(f.coopmat2.cooperative_matrix_reductions),
        conversions: on(f.coopmat2.cooperative_matrix_conversions),
        per_element_operations: on(f.coopmat2.cooperative_matrix_per_element_operations),
        tensor_addressing: on(f.coopmat2.cooperative_matrix_tensor_addressing),
        block_loads: on(f.coopmat2.cooperative_matrix_block_loads),
        max_workgroup: properties.cooperative_matrix_workgroup_scope_max_workgroup_size,
        max_dimension: properties.cooperative_matrix_flexible_dimensions_max_dimension,
        reserved_shared_bytes: properties.cooperative_matrix_workgroup_scope_reserved_shared_memory,
        shapes,
        decode_vector: false,
    }
}
