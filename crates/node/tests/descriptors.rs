//! The kernel's iterator over descriptors lists the same fields as `/proc`, and a stopped process is saved alike from
//! both. Needs root.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use holdfast_checkpoint::files::image::OpenFileKind;
use holdfast_checkpoint::files::{
    DescriptorCopier, DescriptorListing, EpollDigest, EpollLine, FdInfo, FilesSnapshot,
    ListedDescriptor, SaveLimits,
};
use holdfast_node::dataplane::ProcessDescriptorLister;
use rustix::event::epoll;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A shell that opens descriptors of many kinds and stops; it stops again after one of them has advanced, and again
/// with other descriptors. Its arguments are a port and a directory.
const SHELL_SCRIPT: &str = r#"
cd "$2"
for f in /proc/$$/fd/*; do n=${f##*/}; [ $n -gt 2 ] && eval "exec $n>&-"; done
for n in {10..40}; do eval "exec $n<>/dev/tcp/127.0.0.1/$1"; done
exec 41<>/dev/udp/127.0.0.1/$1 42>file 43<file 44>&43 45</dev/zero 46<. 47>>file
mkfifo fifo
exec 48<>fifo
exec 50<&10
echo some >&42
kill -STOP $$
read -r _ <&43
kill -STOP $$
exec 10>&- 11<>/dev/tcp/127.0.0.1/$1 12>&13
kill -STOP $$
"#;

struct Shell(Child);

impl Shell {
    fn start(port: u16, directory: &str) -> Self {
        let child = Command::new("bash")
            .args(["-c", SHELL_SCRIPT, "shell", &port.to_string(), directory])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let shell = Self(child.expect("bash"));
        shell.wait_until_stopped();
        shell
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    fn wait_until_stopped(&self) {
        let since = Instant::now();
        loop {
            let path = format!("/proc/{}/status", self.pid());
            let status = fs::read_to_string(path).expect("it runs");
            if status.contains("State:\tT") {
                return;
            }
            assert!(
                since.elapsed() < TIMEOUT,
                "exceeded time: the shell did not stop"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets the shell run to its next stop, at which `is_reached` is true.
    fn run_to_next_stop(&self, is_reached: impl Fn(i32) -> bool) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("continued");
        // The shell may still be seen in the old stop for a moment.
        let since = Instant::now();
        while !is_reached(self.pid()) {
            assert!(
                since.elapsed() < TIMEOUT,
                "exceeded time: the shell did not continue"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        self.wait_until_stopped();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn read_fdinfo(pid: i32, number: u32) -> Option<FdInfo> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    Some(FdInfo::parse(&text).expect("fdinfo"))
}

#[test]
fn listed_fields_equal_proc_fdinfo() {
    let file = File::open("/proc/self/exe").expect("open");
    let locked = tempfile::tempfile().expect("a file");
    locked.lock().expect("locked");
    let listener = TcpListener::bind("[::1]:0").expect("bind");
    let stream = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    stream.set_nonblocking(true).expect("nonblocking");
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let (unix, _other) = std::os::unix::net::UnixStream::pair().expect("pair");
    let without_details = [
        file.as_raw_fd(),
        listener.as_raw_fd(),
        stream.as_raw_fd(),
        datagrams.as_raw_fd(),
    ];
    let with_details = [locked.as_raw_fd(), unix.as_raw_fd()];
    let eventfd = rustix::event::eventfd(3, rustix::event::EventfdFlags::empty()).expect("made");
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
    let others: [OwnedFd; 2] = [eventfd, epoll.expect("made")];

    let pid = std::process::id() as i32;
    let listings = ProcessDescriptorLister::new()
        .list(&[pid])
        .expect("the kernel loads the program");
    let [listing] = &listings[..] else {
        panic!("not one listing");
    };
    assert!(!listing.thread_tables);
    let others = others.iter().map(AsRawFd::as_raw_fd);
    let own_numbers: BTreeSet<i32> = others.chain(without_details).chain(with_details).collect();
    let mut listed_numbers = BTreeSet::new();
    for descriptor in &listing.descriptors {
        // Another test opens and closes some descriptors meanwhile.
        if !own_numbers.contains(&(descriptor.number as i32)) {
            continue;
        }
        let fdinfo = read_fdinfo(pid, descriptor.number).expect("it is open");
        listed_numbers.insert(descriptor.number as i32);
        assert!(
            descriptor.has_extra_lines || fdinfo.kind_lines.is_empty(),
            "{}: {}",
            descriptor.number,
            fdinfo.kind_lines
        );
        let without_details_text = FdInfo {
            kind_lines: String::new(),
            ..fdinfo
        };
        assert_eq!(
            descriptor.info, without_details_text,
            "descriptor {}",
            descriptor.number
        );
        let number = descriptor.number as i32;
        assert!(
            !descriptor.has_extra_lines || !without_details.contains(&number),
            "{number}"
        );
        assert!(
            descriptor.has_extra_lines || !with_details.contains(&number),
            "{number}"
        );
    }
    assert_eq!(listed_numbers, own_numbers);
}

/// Returns the listed entry of one of this process's descriptors.
fn find_listed<'a>(listings: &'a [DescriptorListing], file: &OwnedFd) -> &'a ListedDescriptor {
    let mut descriptors = listings[0].descriptors.iter();
    descriptors
        .find(|descriptor| descriptor.number == file.as_raw_fd() as u32)
        .expect("it is open")
}

/// Returns the digest of the pipes watched by a set, computed from `/proc`.
fn digest_from_proc(
    listings: &[DescriptorListing],
    set: &OwnedFd,
    pipes: &[OwnedFd],
) -> EpollDigest {
    let fdinfo = read_fdinfo(std::process::id() as i32, set.as_raw_fd() as u32);
    let entries = fdinfo.expect("it is open").epoll();
    let file = |line: &EpollLine| {
        let mut pipes = pipes.iter();
        let watched = pipes.find(|pipe| pipe.as_raw_fd() as u32 == line.fd);
        find_listed(listings, watched.expect("a pipe")).file
    };
    let entries = entries.iter();
    EpollDigest::from_entries(entries.map(|line| (file(line), line.fd, line.events, line.data)))
}

#[test]
fn epoll_digest_equals_digest_of_its_entries() {
    let descriptors = ProcessDescriptorLister::new();
    let own_pid = [std::process::id() as i32];
    let list = || {
        descriptors
            .list(&own_pid)
            .expect("the kernel loads the program")
    };
    let pipes = (0..700).map(|_| std::io::pipe().expect("a pipe").0);
    let pipes: Vec<OwnedFd> = pipes.map(OwnedFd::from).collect();
    let data = |index: usize| epoll::EventData::new_u64(index as u64 * 0x0101_0101_0101);
    let add = |set: &OwnedFd, index: usize| {
        epoll::add(set, &pipes[index], data(index), epoll::EventFlags::IN).expect("added");
    };
    let [one, other, empty] =
        [(); 3].map(|()| epoll::create(epoll::CreateFlags::empty()).expect("a set"));
    (0..700).for_each(|index| add(&one, index));
    (0..700).rev().for_each(|index| add(&other, index));
    let digests = || {
        let listings = list();
        for set in [&one, &other, &empty] {
            let expected = digest_from_proc(&listings, set, &pipes);
            assert_eq!(find_listed(&listings, set).epoll_digest, Some(expected));
        }
        let watches_of = |file| find_listed(&listings, file).epoll_digest;
        assert_eq!(watches_of(&pipes[0]), None, "a pipe is no epoll set");
        (watches_of(&one), watches_of(&other))
    };
    let (first, second) = digests();
    assert_eq!(first, second, "the same entries");
    epoll::modify(&other, &pipes[350], data(350), epoll::EventFlags::OUT).expect("modified");
    let (first_still, changed) = digests();
    assert_eq!(first_still, first);
    assert_ne!(changed, first);
    let watches = || find_listed(&list(), &one).epoll_digest;
    rustix::fs::flock(&one, rustix::fs::FlockOperation::LockShared).expect("locked");
    assert_eq!(watches(), None, "a lock adds a line to fdinfo");
    rustix::fs::flock(&one, rustix::fs::FlockOperation::Unlock).expect("unlocked");
    assert_eq!(watches(), first);
}

#[test]
fn listing_and_proc_save_same_image() {
    let directory = tempfile::tempdir().expect("a directory");
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let shell = Shell::start(port, directory.path().to_str().expect("a path"));
    let pids = [shell.pid()];
    let descriptors = ProcessDescriptorLister::new();
    let snapshot = FilesSnapshot::save(&pids, &SaveLimits::default())
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(
        snapshot.socket_fds.len(),
        32,
        "31 TCP sockets and one of UDP"
    );

    let known: Arc<BTreeSet<_>> = Arc::new(snapshot.socket_fds.keys().copied().collect());
    let list = || {
        descriptors
            .list(&pids)
            .expect("the kernel loads the program")
    };
    let compare = |new_sockets: usize, prepared: bool| {
        let by_proc = snapshot.save_frozen(&pids).expect("saved");
        let by_listing = snapshot.save_frozen_from_listings(&pids, list(), &known);
        let by_listing = by_listing.expect("saved");
        assert_eq!(by_listing.socket_fds.is_from_prediction(), prepared);
        assert_eq!(by_listing.changes, by_proc.changes);
        assert_eq!(by_listing.closed_sockets, by_proc.closed_sockets);
        assert_eq!(
            by_listing.socket_fds.all(&snapshot),
            by_proc.socket_fds.all(&snapshot)
        );
        assert_eq!(
            by_listing.sockets.len(),
            new_sockets,
            "only new sockets are copied"
        );
        let mut image = snapshot.image.clone();
        image.apply(by_listing.changes).expect("an image");
        let mut copier = DescriptorCopier::default();
        for (id, place) in by_listing.socket_fds.all(&snapshot) {
            let copy = copier.copy(place).expect("a copy");
            let inode = rustix::fs::fstat(&copy).expect("stat").st_ino;
            let kind = &image.files[&id].kind;
            assert!(matches!(kind, OpenFileKind::Inet { inode: of, .. } if *of == inode));
        }
        image
    };
    snapshot.predict_freeze(&pids, list(), &known);
    let before = compare(0, true);
    assert_eq!(before, compare(0, false), "a prediction is used once");

    snapshot.predict_freeze(&pids, list(), &known);
    shell.run_to_next_stop(|pid| read_fdinfo(pid, 43).is_some_and(|info| info.offset > 0));
    let after_io = compare(0, true);
    assert_ne!(before, after_io);

    snapshot.predict_freeze(&pids, list(), &known);
    shell.run_to_next_stop(|pid| read_fdinfo(pid, 10).is_none());
    assert_ne!(after_io, compare(1, false));
    snapshot.predict_freeze(&pids, list(), &known);
    assert!(!snapshot.has_prediction(), "another descriptor is open");
}
