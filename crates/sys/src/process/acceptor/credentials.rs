//! Credentials of threads. The order matters: each call needs rights that later calls remove.

use super::husk::{Husk, Script};
use crate::process::error::{Error, Result};
use crate::process::image::{Credentials, FrozenThread, Process};
use serde_bytes::ByteBuf;
use std::os::fd::BorrowedFd;

/// `SECBIT_NO_SETUID_FIXUP`: a change of user IDs leaves capabilities unchanged.
const KEEP: u64 = 1 << 2;
/// `SECBIT_KEEP_CAPS`.
const KEEP_CAPS: u32 = 1 << 4;
/// `CAP_CHECKPOINT_RESTORE`, as a set.
const OWN: u64 = 1 << 40;
/// `_LINUX_CAPABILITY_VERSION_3`.
const VERSION: u64 = 0x2008_0522;

/// Credentials of an empty process, from before it receives anything of the image until it runs.
#[derive(Clone, Debug)]
pub(super) struct Who {
    credentials: Credentials,
    no_new_privileges: bool,
}

impl Who {
    /// Checks that the state's credentials equal the ones that the process was given. Rights once given up cannot be
    /// regained.
    pub fn check(
        &self,
        pid: i32,
        credentials: &Credentials,
        no_new_privileges: bool,
    ) -> Result<()> {
        let of = |who: &Credentials| {
            let mut groups = who.groups.clone();
            groups.sort_unstable();
            (who.uids, who.gids, who.capabilities, groups)
        };
        let more = self.no_new_privileges && !no_new_privileges;
        if of(credentials) == of(&self.credentials) && !more {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "a thread of process {pid} has other users, groups or capabilities than its process had before; try again, or \
             allow root's processes there"
        )))
    }
}

/// Gives an empty process the credentials of its original and no other rights, before it receives anything of the
/// image. One capability stays until the process gets its state: `CAP_CHECKPOINT_RESTORE`. The process needs it to
/// create threads and children with the original's IDs and to set the original's executable.
pub(super) fn lower(
    husk: &mut Husk,
    process: &Process,
    directory: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let who = &process.credentials;
    let mut script = husk.script();
    if let Some(directory) = directory {
        let number = husk.receive(&mut script, directory)?;
        script.call("its working directory", libc::SYS_fchdir, &[number]);
        script.call("close", libc::SYS_close, &[number]);
    }
    ids(who, &mut script)?;
    bounding_set(who, &mut script);
    securebits(0, &mut script);
    let [inheritable, ..] = who.capabilities;
    capset([inheritable, OWN, OWN], &mut script)?;
    if process.no_new_privileges {
        no_new_privileges(&mut script);
    }
    husk.run(script)?;
    husk.who = Some(Who {
        credentials: who.clone(),
        no_new_privileges: process.no_new_privileges,
    });
    husk.directory = directory.map(|_| process.directory.clone());
    Ok(())
}

/// Returns the number of filters, oldest first, that all threads of a process have in common: 0 for a single thread.
pub(super) fn common_filters(threads: &[FrozenThread]) -> usize {
    let Some((first, others)) = threads.split_first() else {
        return 0;
    };
    let alike = |other: &FrozenThread| {
        let pairs = first.filters.iter().zip(&other.filters);
        pairs.take_while(|(one, other)| one == other).count()
    };
    others.iter().map(alike).min().unwrap_or(0)
}

/// Adds the calls by which the first thread gives all threads of its process their common filters. The kernel
/// synchronizes the filters of threads (`SECCOMP_FILTER_FLAG_TSYNC`) only if one thread's filters descend from the
/// other's. Equal filters that each thread installs by itself are therefore not enough.
pub(super) fn share_filters(
    husk: &Husk,
    first: &FrozenThread,
    common: usize,
    script: &mut Script,
) -> Result<()> {
    if husk.who.is_some() && first.no_new_privileges {
        no_new_privileges(script);
    }
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
    filters(&first.filters[..common], flags, script)
}

/// Adds the calls that give a thread its original's credentials. Filters come first: they are suspended while the
/// thread is traced. A process that has already given up the restorer's rights gives up the rest here. The first
/// `shared` filters are installed already.
pub(super) fn calls(
    husk: &Husk,
    thread: &FrozenThread,
    shared: usize,
    script: &mut Script,
) -> Result<()> {
    let own_filters = &thread.filters[shared..];
    let who = &thread.credentials;
    if let Some(lowered) = &husk.who {
        lowered.check(husk.pid, who, thread.no_new_privileges)?;
        if thread.no_new_privileges {
            no_new_privileges(script);
        }
        filters(own_filters, 0, script)?;
        let [inheritable, permitted, effective, ..] = who.capabilities;
        capset([inheritable, permitted, effective], script)?;
        if who.secure_bits & KEEP_CAPS != 0 {
            script.call(
                "PR_SET_KEEPCAPS",
                libc::SYS_prctl,
                &prctl(libc::PR_SET_KEEPCAPS, 1, 0),
            );
        }
        return Ok(());
    }
    securebits(KEEP, script);
    filters(own_filters, 0, script)?;
    ids(who, script)?;
    capabilities(who, script)?;
    if thread.no_new_privileges {
        no_new_privileges(script);
    }
    Ok(())
}

/// Sets groups and users, and leaves capabilities unchanged.
fn ids(who: &Credentials, script: &mut Script) -> Result<()> {
    securebits(KEEP, script);
    let groups: Vec<u8> = who
        .groups
        .iter()
        .flat_map(|group| group.to_ne_bytes())
        .collect();
    let list = script.bytes(&groups)?;
    script.call(
        "setgroups",
        libc::SYS_setgroups,
        &[who.groups.len() as u64, list],
    );
    let [real, effective, saved, filesystem] = who.gids.map(u64::from);
    script.call("setresgid", libc::SYS_setresgid, &[real, effective, saved]);
    script.call("setfsgid", libc::SYS_setfsgid, &[filesystem]);
    let [real, effective, saved, filesystem] = who.uids.map(u64::from);
    script.call("setresuid", libc::SYS_setresuid, &[real, effective, saved]);
    script.call("setfsuid", libc::SYS_setfsuid, &[filesystem]);
    Ok(())
}

fn securebits(bits: u64, script: &mut Script) {
    let arguments = prctl(libc::PR_SET_SECUREBITS, bits, 0);
    script.call("securebits", libc::SYS_prctl, &arguments);
}

fn no_new_privileges(script: &mut Script) {
    let arguments = prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0);
    script.call("no_new_privs", libc::SYS_prctl, &arguments);
}

fn bounding_set(who: &Credentials, script: &mut Script) {
    let [.., bounding, _] = who.capabilities;
    for number in (0..41).filter(|number| bounding & (1 << number) == 0) {
        let arguments = prctl(libc::PR_CAPBSET_DROP, number, 0);
        script.call("bounding set", libc::SYS_prctl, &arguments);
    }
}

/// Sets the inheritable, permitted and effective capabilities.
fn capset([inheritable, permitted, effective]: [u64; 3], script: &mut Script) -> Result<()> {
    let header = script.words(&[VERSION])?;
    let halves = |shift: u32| {
        let half = |set: u64| set >> shift & 0xffff_ffff;
        [half(effective) | half(permitted) << 32, half(inheritable)]
    };
    // Three words of 32 bits for each half: effective, permitted, inheritable.
    let ([low, low_inherited], [high, high_inherited]) = (halves(0), halves(32));
    let data = script.words(&[
        low,
        low_inherited | (high & 0xffff_ffff) << 32,
        high >> 32 | high_inherited << 32,
    ])?;
    script.call("capset", libc::SYS_capset, &[header, data]);
    Ok(())
}

/// Sets all capabilities. The securebits are set while the capability for them is still there.
fn capabilities(who: &Credentials, script: &mut Script) -> Result<()> {
    let [inheritable, permitted, effective, _, ambient] = who.capabilities;
    bounding_set(who, script);
    securebits(u64::from(who.secure_bits), script);
    capset([inheritable, permitted, effective], script)?;
    for number in (0..41).filter(|number| ambient & (1 << number) != 0) {
        let raise = prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_RAISE as u64,
            number,
        );
        script.call("ambient set", libc::SYS_prctl, &raise);
    }
    Ok(())
}

fn prctl(option: i32, value: u64, more: u64) -> [u64; 5] {
    [option as u64, value, more, 0, 0]
}

fn filters(filters: &[ByteBuf], flags: u64, script: &mut Script) -> Result<()> {
    for filter in filters {
        let code = script.bytes(filter)?;
        let program = script.words(&[filter.len() as u64 / 8, code])?;
        let arguments = [u64::from(libc::SECCOMP_SET_MODE_FILTER), flags, program];
        script.call("seccomp", libc::SYS_seccomp, &arguments);
    }
    Ok(())
}
