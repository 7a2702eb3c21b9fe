//! Initial memory of a stub process: the stub, and the kernel's own pages (vDSO) at the original's addresses.

use super::foreign_vdso::VdsoImages;
use super::memory_fields::point_memory_fields_into_stub;
use super::stub_process::StubProcess;
use crate::address_ranges::AddressRanges;
use crate::donor::free_range;
use crate::error::{Error, Result};
use crate::image::{ADDRESS_END, MappingBacking, ProcessLayout};
use crate::procfs::{self, MapLine};
use crate::trace::STUB_BYTES;

/// Unmaps everything but the stub, and moves the kernel's pages to the original's addresses.
pub(super) fn unmap_all(
    stub_process: &mut StubProcess,
    process: &ProcessLayout,
    foreign: Option<&VdsoImages>,
) -> Result<()> {
    let lines = procfs::mappings(stub_process.pid)?;
    let (start, end) = (
        stub_process.stub.address,
        stub_process.stub.address + STUB_BYTES,
    );
    let mut script = stub_process.script();
    unregister_rseq(stub_process, &mut script)?;
    point_memory_fields_into_stub(&mut script, start)?;
    let others = lines
        .iter()
        .filter(|line| !is_kernel_mapping(line) && (line.end <= start || line.start >= end));
    for line in others.filter(|line| line.end <= ADDRESS_END) {
        script.add_call(
            "munmap",
            libc::SYS_munmap,
            &[line.start, line.end - line.start],
        );
    }
    stub_process.run_script(script)?;
    stub_process.mappings.clear();
    stub_process.guards = AddressRanges::default();
    stub_process.foreign_vdso = None;
    let kernel_lines: Vec<MapLine> = lines.into_iter().filter(is_kernel_mapping).collect();
    match foreign {
        Some(foreign) if foreign.place_original(stub_process, &kernel_lines, process)? => Ok(()),
        _ => place_vdso(stub_process, &kernel_lines, process),
    }
}

fn is_kernel_mapping(line: &MapLine) -> bool {
    line.name.starts_with(b"[v")
}

fn unregister_rseq(
    stub_process: &StubProcess,
    script: &mut super::stub_process::CallScript,
) -> Result<()> {
    const UNREGISTER: u64 = 1;
    let (address, bytes, signature) = stub_process.first_thread().rseq_area()?;
    if address != 0 {
        let arguments = [address, u64::from(bytes), UNREGISTER, u64::from(signature)];
        script.add_call("rseq", libc::SYS_rseq, &arguments);
    }
    Ok(())
}

/// Moves `[vdso]` and its data through a free range, since old and new addresses may overlap.
fn place_vdso(
    stub_process: &mut StubProcess,
    here: &[MapLine],
    process: &ProcessLayout,
) -> Result<()> {
    let wanted = |name: &[u8]| {
        process
            .mappings
            .iter()
            .find(|mapping| match &mapping.backing {
                MappingBacking::Kernel(kernel) => kernel.as_bytes() == name,
                _ => false,
            })
    };
    let mut used: Vec<(u64, u64)> = process
        .mappings
        .iter()
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    used.extend(here.iter().map(|line| (line.start, line.end)));
    used.push((
        stub_process.stub.address,
        stub_process.stub.address + STUB_BYTES,
    ));
    let total = here.iter().map(|line| line.end - line.start).sum();
    let mut free = free_range::find(&used, total).ok_or(Error::Image("no free address range"))?;
    let (mut move_away, mut move_home) = (stub_process.script(), stub_process.script());
    let how = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut placed = Vec::new();
    for line in here.iter().filter(|line| line.end <= ADDRESS_END) {
        let length = line.end - line.start;
        let Some(mapping) = wanted(&line.name) else {
            move_away.add_call("munmap", libc::SYS_munmap, &[line.start, length]);
            continue;
        };
        if mapping.end - mapping.start != length {
            return Err(vdso_difference(&line.name));
        }
        placed.push(mapping.clone());
        if mapping.start != line.start {
            move_away.add_call(
                "mremap",
                libc::SYS_mremap,
                &[line.start, length, length, how, free],
            );
            move_home.add_call(
                "mremap",
                libc::SYS_mremap,
                &[free, length, length, how, mapping.start],
            );
            free += length;
        }
    }
    let kernel_mappings = process
        .mappings
        .iter()
        .filter(|mapping| matches!(mapping.backing, MappingBacking::Kernel(_)));
    if let Some(missing) = kernel_mappings
        .clone()
        .find(|mapping| !placed.contains(mapping))
    {
        return Err(vdso_difference(format!("{:?}", missing.backing).as_bytes()));
    }
    stub_process.run_script(move_away)?;
    stub_process.run_script(move_home)?;
    placed.sort_by_key(|mapping| mapping.start);
    stub_process.mappings = placed;
    Ok(())
}

fn vdso_difference(name: &[u8]) -> Error {
    Error::Refused(format!(
        "{} of its kernel differs from the donor's",
        String::from_utf8_lossy(name)
    ))
}
