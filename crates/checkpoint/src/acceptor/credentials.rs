//! Credentials of threads. The order matters: each call needs rights that later calls remove.

use super::stub_process::{CallScript, StubProcess};
use crate::error::{Error, Result};
use crate::image::{Credentials, ProcessLayout, ThreadState};
use serde_bytes::ByteBuf;
use std::os::fd::BorrowedFd;

/// `SECBIT_NO_SETUID_FIXUP`: a change of user IDs leaves capabilities unchanged.
const SECBIT_NO_SETUID_FIXUP: u64 = 1 << 2;
/// `SECBIT_KEEP_CAPS`.
const SECBIT_KEEP_CAPS: u32 = 1 << 4;
/// `CAP_CHECKPOINT_RESTORE`, as a set.
const CHECKPOINT_RESTORE: u64 = 1 << 40;
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u64 = 0x2008_0522;

/// Credentials of a stub process, from before it receives anything of the image until it runs.
#[derive(Clone, Debug)]
pub(super) struct LoweredCredentials {
    credentials: Credentials,
    no_new_privileges: bool,
}

impl LoweredCredentials {
    /// Checks that the state's credentials equal the ones that the process was given. Rights once given up cannot be
    /// regained.
    pub fn check(
        &self,
        pid: i32,
        credentials: &Credentials,
        no_new_privileges: bool,
    ) -> Result<()> {
        let comparable = |identity: &Credentials| {
            let mut groups = identity.groups.clone();
            groups.sort_unstable();
            (identity.uids, identity.gids, identity.capabilities, groups)
        };
        let lacks_restriction = self.no_new_privileges && !no_new_privileges;
        if comparable(credentials) == comparable(&self.credentials) && !lacks_restriction {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "a thread of process {pid} has users, groups or capabilities that differ from its process's earlier ones; try \
             again, or allow root's processes at the acceptor"
        )))
    }
}

/// Gives a stub process the credentials of its original and no other rights, before it receives anything of the
/// image. One capability stays until the process gets its state: `CAP_CHECKPOINT_RESTORE`. The process needs it to
/// create threads and children with the original's IDs and to set the original's executable.
pub(super) fn lower_credentials(
    stub_process: &mut StubProcess,
    process: &ProcessLayout,
    directory: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let credentials = &process.credentials;
    let mut script = stub_process.script();
    if let Some(directory) = directory {
        let number = stub_process.pass_fd(&mut script, directory)?;
        script.add_call("its working directory", libc::SYS_fchdir, &[number]);
        script.add_call("close", libc::SYS_close, &[number]);
    }
    add_ids(credentials, &mut script)?;
    add_bounding_set(credentials, &mut script);
    add_securebits(0, &mut script);
    let [inheritable, ..] = credentials.capabilities;
    add_capset(
        [inheritable, CHECKPOINT_RESTORE, CHECKPOINT_RESTORE],
        &mut script,
    )?;
    if process.no_new_privileges {
        add_no_new_privileges(&mut script);
    }
    stub_process.run_script(script)?;
    stub_process.lowered_credentials = Some(LoweredCredentials {
        credentials: credentials.clone(),
        no_new_privileges: process.no_new_privileges,
    });
    stub_process.directory = directory.map(|_| process.directory.clone());
    Ok(())
}

/// Returns the number of filters, oldest first, that all threads of a process have in common: 0 for a single thread.
pub(super) fn count_common_filters(threads: &[ThreadState]) -> usize {
    let Some((first, others)) = threads.split_first() else {
        return 0;
    };
    let common_with_first = |other: &ThreadState| {
        let pairs = first.seccomp_filters.iter().zip(&other.seccomp_filters);
        pairs.take_while(|(one, other)| one == other).count()
    };
    others.iter().map(common_with_first).min().unwrap_or(0)
}

/// Adds the calls by which the first thread gives all threads of its process their common filters. The kernel
/// synchronizes the filters of threads (`SECCOMP_FILTER_FLAG_TSYNC`) only if one thread's filters descend from the
/// other's. Equal filters that each thread installs by itself are therefore not enough.
pub(super) fn add_common_filters(
    stub_process: &StubProcess,
    first: &ThreadState,
    common: usize,
    script: &mut CallScript,
) -> Result<()> {
    if stub_process.lowered_credentials.is_some() && first.no_new_privileges {
        add_no_new_privileges(script);
    }
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
    add_filters(&first.seccomp_filters[..common], flags, script)
}

/// Adds the calls that give a thread its original's credentials. Filters come first: they are suspended while the
/// thread is traced. A process that has already given up the restorer's rights gives up the rest here. The first
/// `shared` filters are installed already.
pub(super) fn add_credentials(
    stub_process: &StubProcess,
    thread: &ThreadState,
    shared: usize,
    script: &mut CallScript,
) -> Result<()> {
    let own_filters = &thread.seccomp_filters[shared..];
    let credentials = &thread.credentials;
    if let Some(lowered) = &stub_process.lowered_credentials {
        lowered.check(stub_process.pid, credentials, thread.no_new_privileges)?;
        if thread.no_new_privileges {
            add_no_new_privileges(script);
        }
        add_filters(own_filters, 0, script)?;
        let [inheritable, permitted, effective, ..] = credentials.capabilities;
        add_capset([inheritable, permitted, effective], script)?;
        if credentials.secure_bits & SECBIT_KEEP_CAPS != 0 {
            script.add_call(
                "PR_SET_KEEPCAPS",
                libc::SYS_prctl,
                &prctl_arguments(libc::PR_SET_KEEPCAPS, 1, 0),
            );
        }
        return Ok(());
    }
    add_securebits(SECBIT_NO_SETUID_FIXUP, script);
    add_filters(own_filters, 0, script)?;
    add_ids(credentials, script)?;
    add_capabilities(credentials, script)?;
    if thread.no_new_privileges {
        add_no_new_privileges(script);
    }
    Ok(())
}

/// Sets groups and users, and leaves capabilities unchanged.
fn add_ids(who: &Credentials, script: &mut CallScript) -> Result<()> {
    add_securebits(SECBIT_NO_SETUID_FIXUP, script);
    let groups: Vec<u8> = who
        .groups
        .iter()
        .flat_map(|group| group.to_ne_bytes())
        .collect();
    let list = script.add_bytes(&groups)?;
    script.add_call(
        "setgroups",
        libc::SYS_setgroups,
        &[who.groups.len() as u64, list],
    );
    let [real, effective, saved, filesystem] = who.gids.map(u64::from);
    script.add_call("setresgid", libc::SYS_setresgid, &[real, effective, saved]);
    script.add_call("setfsgid", libc::SYS_setfsgid, &[filesystem]);
    let [real, effective, saved, filesystem] = who.uids.map(u64::from);
    script.add_call("setresuid", libc::SYS_setresuid, &[real, effective, saved]);
    script.add_call("setfsuid", libc::SYS_setfsuid, &[filesystem]);
    Ok(())
}

fn add_securebits(bits: u64, script: &mut CallScript) {
    let arguments = prctl_arguments(libc::PR_SET_SECUREBITS, bits, 0);
    script.add_call("securebits", libc::SYS_prctl, &arguments);
}

fn add_no_new_privileges(script: &mut CallScript) {
    let arguments = prctl_arguments(libc::PR_SET_NO_NEW_PRIVS, 1, 0);
    script.add_call("no_new_privs", libc::SYS_prctl, &arguments);
}

fn add_bounding_set(who: &Credentials, script: &mut CallScript) {
    let [.., bounding, _] = who.capabilities;
    for number in (0..41).filter(|number| bounding & (1 << number) == 0) {
        let arguments = prctl_arguments(libc::PR_CAPBSET_DROP, number, 0);
        script.add_call("bounding set", libc::SYS_prctl, &arguments);
    }
}

/// Sets the inheritable, permitted and effective capabilities.
fn add_capset(
    [inheritable, permitted, effective]: [u64; 3],
    script: &mut CallScript,
) -> Result<()> {
    let header = script.add_words(&[CAPABILITY_VERSION])?;
    let halves = |shift: u32| {
        let half = |set: u64| set >> shift & 0xffff_ffff;
        [half(effective) | half(permitted) << 32, half(inheritable)]
    };
    // Three words of 32 bits for each half: effective, permitted, inheritable.
    let ([low, low_inherited], [high, high_inherited]) = (halves(0), halves(32));
    let data = script.add_words(&[
        low,
        low_inherited | (high & 0xffff_ffff) << 32,
        high >> 32 | high_inherited << 32,
    ])?;
    script.add_call("capset", libc::SYS_capset, &[header, data]);
    Ok(())
}

/// Sets all capabilities. The securebits are set while the capability for them is still there.
fn add_capabilities(who: &Credentials, script: &mut CallScript) -> Result<()> {
    let [inheritable, permitted, effective, _, ambient] = who.capabilities;
    add_bounding_set(who, script);
    add_securebits(u64::from(who.secure_bits), script);
    add_capset([inheritable, permitted, effective], script)?;
    for number in (0..41).filter(|number| ambient & (1 << number) != 0) {
        let raise = prctl_arguments(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_RAISE as u64,
            number,
        );
        script.add_call("ambient set", libc::SYS_prctl, &raise);
    }
    Ok(())
}

fn prctl_arguments(option: i32, value: u64, more: u64) -> [u64; 5] {
    [option as u64, value, more, 0, 0]
}

fn add_filters(filters: &[ByteBuf], flags: u64, script: &mut CallScript) -> Result<()> {
    for filter in filters {
        let code = script.add_bytes(filter)?;
        let program = script.add_words(&[filter.len() as u64 / 8, code])?;
        let arguments = [u64::from(libc::SECCOMP_SET_MODE_FILTER), flags, program];
        script.add_call("seccomp", libc::SYS_seccomp, &arguments);
    }
    Ok(())
}
