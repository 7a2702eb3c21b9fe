//! Initial memory of an empty process: the stub, and the kernel's own pages (vDSO) at the original's addresses.

use super::foreign::Foreign;
use super::husk::Husk;
use crate::process::donor::gap;
use crate::process::error::{Error, Result};
use crate::process::image::{ADDRESS_END, Backing, Process};
use crate::process::procfs::{self, MapLine};
use crate::process::ranges::Ranges;
use crate::process::trace::STUB_BYTES;

/// Unmaps everything but the stub, and moves the kernel's pages to the original's addresses.
pub(super) fn empty(husk: &mut Husk, process: &Process, foreign: Option<&Foreign>) -> Result<()> {
    let lines = procfs::mappings(husk.pid)?;
    let (start, end) = (husk.stub.address, husk.stub.address + STUB_BYTES);
    let mut script = husk.script();
    forget_rseq(husk, &mut script)?;
    let others = lines
        .iter()
        .filter(|line| !is_kernels(line) && (line.end <= start || line.start >= end));
    for line in others.filter(|line| line.end <= ADDRESS_END) {
        script.call(
            "munmap",
            libc::SYS_munmap,
            &[line.start, line.end - line.start],
        );
    }
    husk.run(script)?;
    husk.mappings.clear();
    husk.guards = Ranges::default();
    husk.foreign = None;
    let here: Vec<MapLine> = lines.into_iter().filter(is_kernels).collect();
    match foreign {
        Some(foreign) if foreign.place(husk, &here, process)? => Ok(()),
        _ => place_kernel(husk, &here, process),
    }
}

fn is_kernels(line: &MapLine) -> bool {
    line.name.starts_with(b"[v")
}

fn forget_rseq(husk: &Husk, script: &mut super::husk::Script) -> Result<()> {
    const UNREGISTER: u64 = 1;
    let (address, bytes, signature) = husk.first().rseq()?;
    if address != 0 {
        let arguments = [address, u64::from(bytes), UNREGISTER, u64::from(signature)];
        script.call("rseq", libc::SYS_rseq, &arguments);
    }
    Ok(())
}

/// Moves `[vdso]` and its data through a free range, since old and new addresses may overlap.
fn place_kernel(husk: &mut Husk, here: &[MapLine], process: &Process) -> Result<()> {
    let wanted = |name: &[u8]| {
        process
            .mappings
            .iter()
            .find(|mapping| match &mapping.backing {
                Backing::Kernel(kernel) => kernel.as_bytes() == name,
                _ => false,
            })
    };
    let mut used: Vec<(u64, u64)> = process
        .mappings
        .iter()
        .map(|mapping| (mapping.start, mapping.end))
        .collect();
    used.extend(here.iter().map(|line| (line.start, line.end)));
    used.push((husk.stub.address, husk.stub.address + STUB_BYTES));
    let total = here.iter().map(|line| line.end - line.start).sum();
    let mut free = gap::find(&used, total).ok_or(Error::Image("no free addresses"))?;
    let (mut away, mut home) = (husk.script(), husk.script());
    let how = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut placed = Vec::new();
    for line in here.iter().filter(|line| line.end <= ADDRESS_END) {
        let length = line.end - line.start;
        let Some(mapping) = wanted(&line.name) else {
            away.call("munmap", libc::SYS_munmap, &[line.start, length]);
            continue;
        };
        if mapping.end - mapping.start != length {
            return Err(differs(&line.name));
        }
        placed.push(mapping.clone());
        if mapping.start != line.start {
            away.call(
                "mremap",
                libc::SYS_mremap,
                &[line.start, length, length, how, free],
            );
            home.call(
                "mremap",
                libc::SYS_mremap,
                &[free, length, length, how, mapping.start],
            );
            free += length;
        }
    }
    let all = process
        .mappings
        .iter()
        .filter(|mapping| matches!(mapping.backing, Backing::Kernel(_)));
    if let Some(missing) = all.clone().find(|mapping| !placed.contains(mapping)) {
        return Err(differs(format!("{:?}", missing.backing).as_bytes()));
    }
    husk.run(away)?;
    husk.run(home)?;
    placed.sort_by_key(|mapping| mapping.start);
    husk.mappings = placed;
    Ok(())
}

fn differs(name: &[u8]) -> Error {
    Error::Refused(format!(
        "{} of its kernel differs from the donor's",
        String::from_utf8_lossy(name)
    ))
}
