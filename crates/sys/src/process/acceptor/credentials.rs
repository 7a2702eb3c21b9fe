//! Who a thread is. Every call needs what the calls behind it take away.

use super::husk::Script;
use crate::process::error::Result;
use crate::process::image::{Credentials, FrozenThread};

/// `SECBIT_NO_SETUID_FIXUP`: changing IDs leaves capabilities alone.
const KEEP: u64 = 1 << 2;
/// `_LINUX_CAPABILITY_VERSION_3`.
const VERSION: u64 = 0x2008_0522;

/// Calls that make a thread of the restorer's who it was, filters first: they are suspended while it is traced.
pub(super) fn calls(thread: &FrozenThread, script: &mut Script) -> Result<()> {
    let who = &thread.credentials;
    script.call(
        "securebits",
        libc::SYS_prctl,
        &prctl(libc::PR_SET_SECUREBITS, KEEP, 0),
    );
    filters(thread, script)?;
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
    capabilities(who, script)?;
    if thread.no_new_privileges {
        script.call(
            "no_new_privs",
            libc::SYS_prctl,
            &prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0),
        );
    }
    Ok(())
}

/// First with what changing the securebits takes, then exactly.
fn capabilities(who: &Credentials, script: &mut Script) -> Result<()> {
    let [inheritable, permitted, effective, bounding, ambient] = who.capabilities;
    for number in (0..41).filter(|number| bounding & (1 << number) == 0) {
        script.call(
            "bounding set",
            libc::SYS_prctl,
            &prctl(libc::PR_CAPBSET_DROP, number, 0),
        );
    }
    let bits = u64::from(who.secure_bits);
    script.call(
        "securebits",
        libc::SYS_prctl,
        &prctl(libc::PR_SET_SECUREBITS, bits, 0),
    );
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

fn filters(thread: &FrozenThread, script: &mut Script) -> Result<()> {
    for filter in &thread.filters {
        let code = script.bytes(filter)?;
        let program = script.words(&[filter.len() as u64 / 8, code])?;
        let arguments = [u64::from(libc::SECCOMP_SET_MODE_FILTER), 0, program];
        script.call("seccomp", libc::SYS_seccomp, &arguments);
    }
    Ok(())
}
