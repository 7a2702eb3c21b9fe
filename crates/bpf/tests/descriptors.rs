//! The iterator over descriptors shows the same data as `/proc`. Needs root.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use holdfast_bpf::descriptors::{Descriptor, DescriptorLister, descriptor_flags};

/// More descriptors than one read of the kernel returns.
const DESCRIPTOR_COUNT: usize = 1_500;

fn own_descriptors(lister: &DescriptorLister) -> BTreeMap<u32, Descriptor> {
    let all = lister.list(std::process::id() as i32).expect("list");
    let count = all.len();
    let map: BTreeMap<u32, Descriptor> = all.into_iter().map(|one| (one.fd, one)).collect();
    assert_eq!(map.len(), count, "each once");
    map
}

#[test]
fn open_descriptors_are_listed_with_their_kind() {
    let lister = DescriptorLister::load().expect("load");
    let file = File::open("/proc/self/exe").expect("open");
    let duplicate = file.try_clone().expect("dup");
    let other = File::open("/proc/self/exe").expect("open");
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let datagrams = UdpSocket::bind("[::1]:0").expect("bind");
    let descriptors = own_descriptors(&lister);
    let descriptor = |fd: i32| descriptors[&(fd as u32)];
    let (one, two) = (
        descriptor(file.as_raw_fd()),
        descriptor(duplicate.as_raw_fd()),
    );
    assert_eq!((one.file, one.table), (two.file, two.table));
    assert_ne!(one.file, descriptor(other.as_raw_fd()).file);
    let stat = file.metadata().expect("stat");
    assert_eq!((one.inode, u32::from(one.mode)), (stat.ino(), stat.mode()));
    assert_eq!((one.family, one.cookie), (0, 0));
    assert_ne!(one.bits & descriptor_flags::CLOSE_ON_EXEC, 0);
    let tcp = descriptor(listener.as_raw_fd());
    assert_eq!((tcp.family, tcp.socket_type, tcp.protocol), (2, 1, 6));
    assert_ne!(tcp.cookie, 0);
    let udp = descriptor(datagrams.as_raw_fd());
    assert_eq!((udp.family, udp.socket_type, udp.protocol), (10, 2, 17));
    assert_ne!(udp.cookie, tcp.cookie);
}

#[test]
fn many_descriptors_are_all_listed() {
    let lister = DescriptorLister::load().expect("load");
    let (one, other) = std::io::pipe().expect("pipe");
    let (one, other) = (OwnedFd::from(one), OwnedFd::from(other));
    let many: Vec<OwnedFd> = (0..DESCRIPTOR_COUNT)
        .map(|_| one.try_clone().expect("dup"))
        .chain([other])
        .collect();
    let descriptors = own_descriptors(&lister);
    for fd in &many[..DESCRIPTOR_COUNT] {
        let record = descriptors[&(fd.as_raw_fd() as u32)];
        assert_eq!(record.file, descriptors[&(one.as_raw_fd() as u32)].file);
    }
    assert_eq!(lister.list(i32::MAX).expect("list"), [], "no such process");
}
