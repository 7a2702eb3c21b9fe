//! Changes every socket option that the kernel can read and set, so that a test can check that all of them survive.

use holdfast_sys::sockopt::{get_bytes, set_bytes};
use std::os::fd::BorrowedFd;

/// Longest value that is read.
const VALUE_LEN_MAX: usize = 64;

/// Level, name, and the value read after all options were set.
pub type VariedOptions = Vec<(i32, i32, Vec<u8>)>;

/// Levels of a socket's own options, each with the first number that belongs to another module (netfilter, MPTCP).
pub const SOCKET_LEVEL: (i32, i32) = (libc::SOL_SOCKET, 100);
pub const IP_LEVEL: (i32, i32) = (libc::IPPROTO_IP, 64);
pub const IPV6_LEVEL: (i32, i32) = (libc::IPPROTO_IPV6, 80);
pub const TCP_LEVEL: (i32, i32) = (libc::IPPROTO_TCP, 48);
pub const UDP_LEVEL: (i32, i32) = (libc::IPPROTO_UDP, 110);

/// Options that are no keepable property of a socket, or have a test of their own: bound devices (set by name),
/// timestamps with numbers, repair mode, keys, and conversion to another address family.
const EXCLUDED_OPTIONS: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX),
    (libc::SOL_SOCKET, libc::SO_LOCK_FILTER),
    // The kernel returns an address for this option, but expects an interface.
    (libc::IPPROTO_IP, libc::IP_MULTICAST_IF),
    (libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM),
    (libc::IPPROTO_TCP, libc::TCP_REPAIR),
    (libc::IPPROTO_TCP, libc::TCP_REPAIR_QUEUE),
    (libc::IPPROTO_TCP, libc::TCP_QUEUE_SEQ),
    (libc::IPPROTO_TCP, libc::TCP_TIMESTAMP),
    // Traffic changes this option.
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK),
    // A corked or decapsulating socket is refused.
    (libc::IPPROTO_UDP, 1),
    (libc::IPPROTO_UDP, 100),
];

/// Changes every option of these levels except `excluded`, and returns the resulting values.
pub fn vary_options(
    socket: BorrowedFd<'_>,
    levels: &[(i32, i32)],
    excluded: &[(i32, i32)],
) -> VariedOptions {
    let mut changed = Vec::new();
    for (level, end) in levels {
        for name in 1..*end {
            let is_excluded =
                EXCLUDED_OPTIONS.contains(&(*level, name)) || excluded.contains(&(*level, name));
            if !is_excluded && change_option(socket, *level, name) {
                changed.push((*level, name));
            }
        }
    }
    let values = changed.into_iter().map(|(level, name)| {
        let value = read(socket, level, name).expect("readable before");
        (level, name, value)
    });
    values.collect()
}

/// Returns the options with values that differ from `varied`.
pub fn differences(socket: BorrowedFd<'_>, varied: &VariedOptions) -> Vec<String> {
    let differing = varied.iter().filter_map(|(level, name, value)| {
        let now = read(socket, *level, *name);
        (now.as_ref() != Some(value)).then(|| format!("{level}/{name}: {value:?}, now {now:?}"))
    });
    differing.collect()
}

fn read(socket: BorrowedFd<'_>, level: i32, name: i32) -> Option<Vec<u8>> {
    let mut value = [0; VALUE_LEN_MAX];
    let length = get_bytes(socket, level, name, &mut value).ok()?;
    (length <= VALUE_LEN_MAX).then(|| value[..length].to_vec())
}

fn change_option(socket: BorrowedFd<'_>, level: i32, name: i32) -> bool {
    let Some(before) = read(socket, level, name) else {
        return false;
    };
    candidate_values(&before).into_iter().any(|value| {
        let is_set = set_bytes(socket, level, name, &value).is_ok();
        is_set && read(socket, level, name).is_some_and(|now| now != before)
    })
}

fn candidate_values(before: &[u8]) -> Vec<Vec<u8>> {
    match before.len() {
        1 | 4 => {
            let mut raw = [0; 4];
            raw[..before.len()].copy_from_slice(before);
            let toggled = i32::from_ne_bytes(raw) ^ 1;
            // The interface 1 in network order, and ports from 40,000 to 50,000.
            let others = [
                1,
                2,
                3,
                9,
                0x48,
                1000,
                12_345,
                1 << 24,
                50_000 << 16 | 40_000,
            ];
            let all = std::iter::once(toggled).chain(others.map(|one: u32| one.cast_signed()));
            all.map(|one| one.to_ne_bytes().to_vec()).collect()
        }
        // `struct linger`, `struct sock_txtime`, bytes a second.
        8 => vec![vec![1, 0, 0, 0, 42, 0, 0, 0], vec![1, 0, 0, 0, 1, 0, 0, 0]],
        // `struct timeval`.
        16 => vec![
            [7_u64, 250_000]
                .iter()
                .flat_map(|one| one.to_ne_bytes())
                .collect(),
        ],
        // Padding: of IPv4, and of an IPv6 header.
        0 => vec![vec![1, 1, 1, 0], vec![0, 0, 1, 4, 0, 0, 0, 0]],
        _ => Vec::new(),
    }
}
