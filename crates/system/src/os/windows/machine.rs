//! Memory, cores and what the process takes.

use windows_sys::Win32::Foundation::{CloseHandle, FILETIME, INVALID_HANDLE_VALUE};
use windows_sys::Win32::System::Diagnostics::ToolHelp::{
    CreateToolhelp32Snapshot, TH32CS_SNAPTHREAD, THREADENTRY32, Thread32First, Thread32Next,
};
use windows_sys::Win32::System::ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::SystemInformation::{
    GetLogicalProcessorInformation, GlobalMemoryStatusEx, MEMORYSTATUSEX, RelationProcessorCore,
    SYSTEM_LOGICAL_PROCESSOR_INFORMATION,
};
use windows_sys::Win32::System::Threading::{
    GetCurrentProcess, GetProcessAffinityMask, GetProcessHandleCount, GetProcessTimes,
};

use crate::memory::{Available, Bound};
use crate::process::Usage;

fn memory() -> Option<MEMORYSTATUSEX> {
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut told: MEMORYSTATUSEX = unsafe { std::mem::zeroed() };
    told.dwLength = u32::try_from(size_of_val(&told)).ok()?;
    // SAFETY: the system fills a structure that is ours and tells its own length.
    (unsafe { GlobalMemoryStatusEx(&mut told) } != 0).then_some(told)
}

/// What this process may still take: of memory, and of what memory and page files hold together, beyond which the system promises none.
pub(crate) fn available_memory() -> Option<Available> {
    let told = memory()?;
    Some(Available { bytes: told.ullAvailPhys.min(told.ullAvailPageFile), bound: Bound::Machine })
}

/// Bytes of memory that this process takes now.
pub(crate) fn taken_memory() -> Option<u64> {
    Some(counters()?.WorkingSetSize as u64)
}

/// Bytes that a bound of the memory is about in all.
pub(crate) fn total_memory(bound: Bound) -> Option<u64> {
    if bound == Bound::Machine { Some(memory()?.ullTotalPhys) } else { None }
}

fn counters() -> Option<PROCESS_MEMORY_COUNTERS> {
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut told: PROCESS_MEMORY_COUNTERS = unsafe { std::mem::zeroed() };
    let bytes = u32::try_from(size_of_val(&told)).ok()?;
    // SAFETY: the handle names this process, and the system fills a structure that is ours and has this length.
    (unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &mut told, bytes) } != 0).then_some(told)
}

/// The CPUs that this process may run on, a bit each.
fn affinity() -> Option<usize> {
    let (mut own, mut all) = (0, 0);
    // SAFETY: the handle names this process, and the system writes two numbers to memory that is ours.
    let done = unsafe { GetProcessAffinityMask(GetCurrentProcess(), &mut own, &mut all) };
    (done != 0 && own != 0).then_some(own)
}

/// CPUs that this process may run on at once. The standard library counts those of the machine.
pub(crate) fn usable_cpus() -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    affinity().map_or(all, |own| all.min(own.count_ones() as usize))
}

/// Physical cores among the CPUs that this process may run on.
pub(crate) fn physical_cores() -> Option<usize> {
    let each = size_of::<SYSTEM_LOGICAL_PROCESSOR_INFORMATION>();
    let mut bytes = 0;
    // SAFETY: without room the system only tells how much it needs.
    unsafe { GetLogicalProcessorInformation(std::ptr::null_mut(), &mut bytes) };
    let empty = SYSTEM_LOGICAL_PROCESSOR_INFORMATION::default();
    let mut told = vec![empty; (bytes as usize).div_ceil(each)];
    let mut bytes = u32::try_from(told.len() * each).ok()?;
    // SAFETY: the system writes no more than `bytes` bytes to memory that is ours.
    if unsafe { GetLogicalProcessorInformation(told.as_mut_ptr(), &mut bytes) } == 0 {
        return None;
    }
    told.truncate(bytes as usize / each);
    let own = affinity().unwrap_or(usize::MAX);
    let is_core = |one: &&SYSTEM_LOGICAL_PROCESSOR_INFORMATION| one.Relationship == RelationProcessorCore;
    let cores = told.iter().filter(is_core).filter(|core| core.ProcessorMask & own != 0).count();
    (cores > 0).then_some(cores)
}

/// What this process takes now.
pub(crate) fn usage() -> Option<Usage> {
    let none = FILETIME { dwLowDateTime: 0, dwHighDateTime: 0 };
    let [mut made, mut ended, mut kernel, mut user] = [none; 4];
    // SAFETY: the handle names this process, and the system writes to memory that is ours.
    if unsafe { GetProcessTimes(GetCurrentProcess(), &mut made, &mut ended, &mut kernel, &mut user) } == 0 {
        return None;
    }
    // In units of 100 ns.
    let seconds =
        |time: FILETIME| ((u64::from(time.dwHighDateTime) << 32) | u64::from(time.dwLowDateTime)) as f64 / 1e7;
    let mut handles = 0;
    // SAFETY: the handle names this process, and the system writes a number to memory that is ours.
    if unsafe { GetProcessHandleCount(GetCurrentProcess(), &mut handles) } == 0 {
        return None;
    }
    let counters = counters()?;
    Some(Usage {
        cpu_seconds: seconds(kernel) + seconds(user),
        resident_bytes: counters.WorkingSetSize as u64,
        // What the system has promised to hold for this process, in memory or in page files.
        virtual_bytes: counters.PagefileUsage.max(counters.WorkingSetSize) as u64,
        threads: threads()?,
        open_files: u64::from(handles),
        most_files: most_files(),
    })
}

/// Files that this process may have open: as many as there is memory for.
pub(crate) fn most_files() -> Option<u64> {
    None
}

/// Threads of this process, counted among those of the machine.
pub(crate) fn threads() -> Option<u64> {
    // SAFETY: a picture of all threads is taken, which is closed below.
    let all = unsafe { CreateToolhelp32Snapshot(TH32CS_SNAPTHREAD, 0) };
    if all == INVALID_HANDLE_VALUE {
        return None;
    }
    // SAFETY: all of the structure's fields are numbers, for which zeros are right.
    let mut thread: THREADENTRY32 = unsafe { std::mem::zeroed() };
    thread.dwSize = size_of::<THREADENTRY32>() as u32;
    let mut count = 0;
    // SAFETY: the picture is open, and the system fills a structure that is ours and tells its own length.
    let mut more = unsafe { Thread32First(all, &mut thread) };
    while more != 0 {
        count += u64::from(thread.th32OwnerProcessID == std::process::id());
        // SAFETY: the same.
        more = unsafe { Thread32Next(all, &mut thread) };
    }
    // SAFETY: it is open and is used no more.
    unsafe { CloseHandle(all) };
    (count > 0).then_some(count)
}
