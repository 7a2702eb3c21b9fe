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

use holdfast_node::dataplane::Descriptors;
use holdfast_sys::process::files::image::Kind;
use holdfast_sys::process::files::{
    Copier, Draft, EpollLine, FdInfo, Limits, Listed, Listing, Watches,
};
use rustix::event::epoll;

const PATIENCE: Duration = Duration::from_secs(30);

/// A shell that opens descriptors of many kinds and stops; it stops again after one of them has advanced, and again
/// with other descriptors. Its arguments are a port and a directory.
const SHELL: &str = r#"
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
            .args(["-c", SHELL, "shell", &port.to_string(), directory])
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
                since.elapsed() < PATIENCE,
                "exceeded time: it never stopped"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets the shell run to its next stop, at which `until` is true.
    fn run_on(&self, until: impl Fn(i32) -> bool) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("continued");
        // The shell may still be seen in the old stop for a moment.
        let since = Instant::now();
        while !until(self.pid()) {
            assert!(
                since.elapsed() < PATIENCE,
                "exceeded time: it never went on"
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

fn proc_info(pid: i32, number: u32) -> Option<FdInfo> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    Some(FdInfo::parse(&text).expect("fdinfo"))
}

#[test]
fn each_field_is_what_proc_shows() {
    let file = File::open("/proc/self/exe").expect("open");
    let locked = tempfile::tempfile().expect("a file");
    locked.lock().expect("locked");
    let listener = TcpListener::bind("[::1]:0").expect("bind");
    let stream = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    stream.set_nonblocking(true).expect("nonblocking");
    let datagrams = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let (unix, _other) = std::os::unix::net::UnixStream::pair().expect("pair");
    let plain = [
        file.as_raw_fd(),
        listener.as_raw_fd(),
        stream.as_raw_fd(),
        datagrams.as_raw_fd(),
    ];
    let with_more = [locked.as_raw_fd(), unix.as_raw_fd()];
    let events = rustix::event::eventfd(3, rustix::event::EventfdFlags::empty()).expect("made");
    let sets = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::empty());
    let others: [OwnedFd; 2] = [events, sets.expect("made")];

    let pid = std::process::id() as i32;
    let listings = Descriptors::new()
        .list(&[pid])
        .expect("this kernel takes it");
    let [listing] = &listings[..] else {
        panic!("one process, one listing");
    };
    assert!(!listing.thread_tables);
    let others = others.iter().map(AsRawFd::as_raw_fd);
    let own: BTreeSet<i32> = others.chain(plain).chain(with_more).collect();
    let mut met = BTreeSet::new();
    for one in &listing.descriptors {
        // Another test opens and closes some descriptors meanwhile.
        if !own.contains(&(one.number as i32)) {
            continue;
        }
        let shown = proc_info(pid, one.number).expect("it is open");
        met.insert(one.number as i32);
        assert!(
            one.has_more || shown.rest.is_empty(),
            "{}: {}",
            one.number,
            shown.rest
        );
        let all_but_lines = FdInfo {
            rest: String::new(),
            ..shown
        };
        assert_eq!(one.info, all_but_lines, "descriptor {}", one.number);
        let number = one.number as i32;
        assert!(!one.has_more || !plain.contains(&number), "{number}");
        assert!(one.has_more || !with_more.contains(&number), "{number}");
    }
    assert_eq!(met, own);
}

/// Returns the listed entry of one of this process's descriptors.
fn listed<'a>(listings: &'a [Listing], file: &OwnedFd) -> &'a Listed {
    let mut all = listings[0].descriptors.iter();
    all.find(|one| one.number == file.as_raw_fd() as u32)
        .expect("it is open")
}

/// Returns the digest of the pipes watched by a set, computed from `/proc`.
fn shown_digest(listings: &[Listing], set: &OwnedFd, pipes: &[OwnedFd]) -> Watches {
    let shown = proc_info(std::process::id() as i32, set.as_raw_fd() as u32);
    let entries = shown.expect("it is open").epoll();
    let file = |line: &EpollLine| {
        let mut pipes = pipes.iter();
        let watched = pipes.find(|pipe| pipe.as_raw_fd() as u32 == line.fd);
        listed(listings, watched.expect("a pipe")).file
    };
    let entries = entries.iter();
    Watches::of(entries.map(|line| (file(line), line.fd, line.events, line.data)))
}

#[test]
fn a_set_s_digest_is_that_of_its_entries() {
    let descriptors = Descriptors::new();
    let own = [std::process::id() as i32];
    let list = || descriptors.list(&own).expect("this kernel takes it");
    let pipes = (0..700).map(|_| std::io::pipe().expect("a pipe").0);
    let pipes: Vec<OwnedFd> = pipes.map(OwnedFd::from).collect();
    let data = |at: usize| epoll::EventData::new_u64(at as u64 * 0x0101_0101_0101);
    let add = |set: &OwnedFd, at: usize| {
        epoll::add(set, &pipes[at], data(at), epoll::EventFlags::IN).expect("added");
    };
    let [one, other, empty] =
        [(); 3].map(|()| epoll::create(epoll::CreateFlags::empty()).expect("a set"));
    (0..700).for_each(|at| add(&one, at));
    (0..700).rev().for_each(|at| add(&other, at));
    let digests = || {
        let listings = list();
        for set in [&one, &other, &empty] {
            let shown = shown_digest(&listings, set, &pipes);
            assert_eq!(listed(&listings, set).watches, Some(shown));
        }
        let of = |file| listed(&listings, file).watches;
        assert_eq!(of(&pipes[0]), None, "it is no set");
        (of(&one), of(&other))
    };
    let (first, second) = digests();
    assert_eq!(first, second, "the same entries");
    epoll::modify(&other, &pipes[350], data(350), epoll::EventFlags::OUT).expect("modified");
    let (first_still, changed) = digests();
    assert_eq!(first_still, first);
    assert_ne!(changed, first);
    let watches = || listed(&list(), &one).watches;
    rustix::fs::flock(&one, rustix::fs::FlockOperation::LockShared).expect("locked");
    assert_eq!(watches(), None, "locks are lines, too");
    rustix::fs::flock(&one, rustix::fs::FlockOperation::Unlock).expect("unlocked");
    assert_eq!(watches(), first);
}

#[test]
fn a_stopped_process_is_saved_alike_either_way() {
    let directory = tempfile::tempdir().expect("a directory");
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let shell = Shell::start(port, directory.path().to_str().expect("a path"));
    let pids = [shell.pid()];
    let descriptors = Descriptors::new();
    let draft = Draft::save(&pids, &Limits::default()).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(draft.places.len(), 32, "31 TCP sockets and one of UDP");

    let seen: Arc<BTreeSet<_>> = Arc::new(draft.places.keys().copied().collect());
    let list = || descriptors.list(&pids).expect("this kernel takes it");
    let compare = |new_sockets: usize, prepared: bool| {
        let by_proc = draft.save_frozen(&pids).expect("saved");
        let listed = draft.save_frozen_listed(&pids, list(), &seen);
        let listed = listed.expect("saved");
        assert_eq!(listed.places.were_prepared(), prepared);
        assert_eq!(listed.changes, by_proc.changes);
        assert_eq!(listed.gone, by_proc.gone);
        assert_eq!(listed.places.all(&draft), by_proc.places.all(&draft));
        assert_eq!(
            listed.sockets.len(),
            new_sockets,
            "copies of new sockets alone"
        );
        let mut image = draft.image.clone();
        image.apply(listed.changes).expect("an image");
        let mut copier = Copier::default();
        for (id, place) in listed.places.all(&draft) {
            let copy = copier.copy(place).expect("a copy");
            let inode = rustix::fs::fstat(&copy).expect("stat").st_ino;
            let kind = &image.files[&id].kind;
            assert!(matches!(kind, Kind::Inet { inode: of, .. } if *of == inode));
        }
        image
    };
    draft.expect(&pids, list(), &seen);
    let before = compare(0, true);
    assert_eq!(before, compare(0, false), "what was made ready serves once");

    draft.expect(&pids, list(), &seen);
    shell.run_on(|pid| proc_info(pid, 43).is_some_and(|info| info.offset > 0));
    let moved_on = compare(0, true);
    assert_ne!(before, moved_on);

    draft.expect(&pids, list(), &seen);
    shell.run_on(|pid| proc_info(pid, 10).is_none());
    assert_ne!(moved_on, compare(1, false));
    draft.expect(&pids, list(), &seen);
    assert!(!draft.is_prepared(), "something else is open");
}
