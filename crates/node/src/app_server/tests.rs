use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use holdfast_api::Drain;
use holdfast_api::app::{HandOffItem, PROTOCOL_VERSION, decode};

use super::*;

const FLOW: &str = "tcp:10.0.0.1:80-10.0.1.2:4242";

struct Server {
    dir: tempfile::TempDir,
    server: AppServer,
}

impl Server {
    fn start(config: &AppSocketConfig) -> Server {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = AppServer::bind(&dir.path().join("app.sock"), config, "n1").unwrap();
        Server { dir, server }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("app.sock")
    }

    /// Connects a program and opens its session.
    async fn open(&self, name: &'static str) -> (SessionId, Channel) {
        let path = self.path();
        let channel = run_blocking(move || {
            let channel = Channel::connect(path).unwrap();
            send_message(&channel, &open_message(name));
            assert!(matches!(receive_message(&channel), Some(FromDaemon::Opened { node }) if node == "n1"));
            channel
        })
        .await;
        match self.server.recv().await {
            AppEvent::Opened {
                session,
                name: told,
                pid,
            } => {
                assert_eq!((told.as_str(), pid), (name, std::process::id()));
                (session, channel)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

fn open_message(name: &str) -> ToDaemon {
    let name = name.to_owned();
    ToDaemon::Open { name }
}

fn send_message(channel: &Channel, message: &ToDaemon) {
    channel.send(&encode(message).unwrap(), &[]).unwrap();
}

fn receive_message(channel: &Channel) -> Option<FromDaemon> {
    let packet = channel.receive().unwrap()?;
    Some(decode(&packet.bytes).unwrap())
}

fn hand_off_message(descriptor: bool) -> ToDaemon {
    ToDaemon::HandOff {
        batch: 1,
        to: "n2".to_owned(),
        drain: Drain::None,
        items: vec![HandOffItem {
            flow: FLOW.parse().unwrap(),
            application_state: vec![1, 2, 3],
            descriptor,
        }],
        last: true,
    }
}

fn kept_message(reason: usize) -> FromDaemon {
    FromDaemon::Kept {
        flows: vec![FLOW.parse().unwrap()],
        reason: reason.to_string(),
    }
}

#[test]
fn messages_and_descriptors_pass_both_ways() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let mode = fs::metadata(server.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        let (session, program) = server.open("fileserver").await;

        let (mine, theirs) = UnixStream::pair().unwrap();
        let bytes = encode(&hand_off_message(true)).unwrap();
        program.send(&bytes, &[theirs.as_fd()]).unwrap();
        drop(theirs);
        match server.server.recv().await {
            AppEvent::Message {
                session: from,
                message,
                descriptors,
            } => {
                assert_eq!((from, message), (session, hand_off_message(true)));
                let [given] = <[OwnedFd; 1]>::try_from(descriptors).unwrap();
                UnixStream::from(given).write_all(b"through").unwrap();
            }
            other => panic!("{other:?}"),
        }
        let mut got = String::new();
        (&mine).read_to_string(&mut got).unwrap();
        assert_eq!(got, "through");

        let sent = server
            .server
            .send(session, &kept_message(1), vec![mine.into()]);
        sent.unwrap();
        let packet = run_blocking(move || program.receive().unwrap().unwrap()).await;
        assert_eq!(
            decode::<FromDaemon>(&packet.bytes).unwrap(),
            kept_message(1)
        );
        assert_eq!(packet.descriptors.len(), 1);
        // The closure that read the packet also dropped the program's end of the session.
        assert!(
            matches!(server.server.recv().await, AppEvent::Closed { session: s } if s == session)
        );
        let send_after_close = server.server.send(session, &kept_message(2), Vec::new());
        assert!(matches!(send_after_close, Err(AppSendError::Closed(s)) if s == session));
    });
}

/// Checks that `packets` end their own session with an error that contains `text`.
async fn assert_refused(server: &Server, packets: Vec<(Vec<u8>, usize)>, text: &'static str) {
    let path = server.path();
    run_blocking(move || {
        let channel = Channel::connect(path).unwrap();
        let stdin = std::io::stdin();
        for (packet, descriptors) in packets {
            let descriptors = vec![stdin.as_fd(); descriptors];
            // The daemon may have closed already.
            let _ = channel.send(&packet, &descriptors);
        }
        loop {
            match receive_message(&channel) {
                Some(FromDaemon::Opened { .. }) => {}
                Some(FromDaemon::Error { text: told }) => {
                    assert!(told.contains(text), "{told}");
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(receive_message(&channel).is_none());
    })
    .await;
}

#[test]
fn a_malformed_message_ends_its_own_session_only() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let (session, program) = server.open("good").await;
        let open = || (encode(&open_message("bad")).unwrap(), 0);
        let garbage = vec![PROTOCOL_VERSION, 0xff, 0xff];
        let version = vec![PROTOCOL_VERSION + 1, 0];
        let early = encode(&hand_off_message(false)).unwrap();

        assert_refused(&server, vec![(garbage.clone(), 0)], "malformed").await;
        assert_refused(&server, vec![(version, 0)], "update the older side").await;
        assert_refused(&server, vec![(early.clone(), 0)], "must be Open").await;
        let mut opened = 0;
        for (packet, text) in [
            ((garbage, 0), "malformed"),
            (open(), "already open"),
            ((early.clone(), 1), "names 0 descriptors arrived with 1"),
            (
                (encode(&hand_off_message(true)).unwrap(), 0),
                "names 1 descriptors arrived with 0",
            ),
        ] {
            opened += 1;
            assert_refused(&server, vec![open(), packet], text).await;
        }

        // Each opened session is closed; the others cause no event.
        for _ in 0..opened {
            let AppEvent::Opened { session: bad, .. } = server.server.recv().await else {
                panic!("not opened");
            };
            let closed = server.server.recv().await;
            assert!(
                matches!(closed, AppEvent::Closed { session } if session == bad),
                "{closed:?}"
            );
        }
        send_message(&program, &ToDaemon::Withdraw { service: 3 });
        let message = server.server.recv().await;
        assert!(
            matches!(message, AppEvent::Message { session: s, message: ToDaemon::Withdraw { service: 3 }, .. } if s == session),
            "{message:?}"
        );
        assert!(server.server.try_recv().is_none());
    });
}

#[test]
fn unopened_connections_are_limited() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let (session, program) = server.open("good").await;
        let path = server.path();
        let idle = run_blocking(move || {
            let idle = (0..UNOPENED_PER_USER_MAX).map(|_| Channel::connect(&path).unwrap());
            let idle: Vec<Channel> = idle.collect();
            let further = Channel::connect(&path).unwrap();
            match receive_message(&further) {
                Some(FromDaemon::Error { text }) => {
                    assert!(text.contains("without an open session"), "{text}");
                }
                other => panic!("{other:?}"),
            }
            idle
        })
        .await;
        // Open sessions continue, and new ones are accepted once the idle connections are closed.
        send_message(&program, &ToDaemon::Withdraw { service: 3 });
        let message = server.server.recv().await;
        assert!(
            matches!(message, AppEvent::Message { session: s, .. } if s == session),
            "{message:?}"
        );
        drop(idle);
        while server.server.table.sessions.borrow().len() > 1 {
            tokio::task::yield_now().await;
        }
        server.open("next").await;
    });
}

#[test]
fn unread_messages_are_queued_in_order() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let (session, program) = server.open("slow").await;
        const MESSAGES: usize = 5_000;
        for number in 0..MESSAGES {
            let (_, theirs) = UnixStream::pair().unwrap();
            let descriptors = if number % 10 == 0 {
                vec![theirs.into()]
            } else {
                Vec::new()
            };
            server
                .server
                .send(session, &kept_message(number), descriptors)
                .unwrap();
        }
        assert!(server.server.queued_messages(session) > 0);
        run_blocking(move || {
            for number in 0..MESSAGES {
                let packet = program.receive().unwrap().unwrap();
                assert_eq!(
                    decode::<FromDaemon>(&packet.bytes).unwrap(),
                    kept_message(number)
                );
                assert_eq!(packet.descriptors.len(), usize::from(number % 10 == 0));
            }
            program
        })
        .await;
        assert_eq!(server.server.queued_messages(session), 0);
    });
}

#[test]
fn session_of_program_that_never_reads_is_closed() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let (session, _program) = server.open("stuck").await;
        let big = FromDaemon::Error {
            text: "x".repeat(50_000),
        };
        let mut queued = 0;
        while server.server.send(session, &big, Vec::new()).is_ok() {
            queued += 1;
            assert!(queued < 4_000, "{queued} messages taken");
        }
        assert!(queued > 1_000, "{queued}");
        assert!(
            matches!(server.server.recv().await, AppEvent::Closed { session: s } if s == session)
        );
    });
}

#[test]
fn the_daemon_can_close_a_session() {
    run(async {
        let server = Server::start(&AppSocketConfig::default());
        let (session, program) = server.open("unwanted").await;
        server.server.close(session);
        assert!(
            matches!(server.server.recv().await, AppEvent::Closed { session: s } if s == session)
        );
        run_blocking(move || assert!(receive_message(&program).is_none())).await;
    });
}

#[test]
fn users_outside_allowed_uids_are_refused() {
    run(async {
        const NOBODY: u32 = 65_534;
        const SOMEBODY: u32 = 65_533;
        let server = Server::start(&AppSocketConfig {
            group: None,
            allowed_uids: vec![SOMEBODY],
        });
        let mode = fs::metadata(server.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o666);
        let answer = |uid: u32, path: PathBuf| {
            run_blocking(move || {
                // Applies to this thread only, which then ends. Without root, the test's own user is a stranger anyway.
                let connect = move || {
                    if rustix::process::getuid().is_root() {
                        let uid = rustix::process::Uid::from_raw(uid);
                        rustix::thread::set_thread_uid(uid).unwrap();
                    }
                    let channel = Channel::connect(path).unwrap();
                    let _ = channel.send(&encode(&open_message("x")).unwrap(), &[]);
                    receive_message(&channel)
                };
                std::thread::spawn(connect).join().unwrap()
            })
        };
        match answer(NOBODY, server.path()).await {
            Some(FromDaemon::Error { text }) => assert!(text.contains("allowed_uids"), "{text}"),
            other => panic!("{other:?}"),
        }
        assert!(server.server.try_recv().is_none());
        if rustix::process::getuid().is_root() {
            let answer = answer(SOMEBODY, server.path()).await;
            assert!(
                matches!(answer, Some(FromDaemon::Opened { .. })),
                "{answer:?}"
            );
        }
    });
}

#[test]
fn unknown_socket_group_is_refused() {
    run(async {
        let dir = tempfile::tempdir().unwrap();
        let config = AppSocketConfig {
            group: Some("no-such-group".to_owned()),
            allowed_uids: Vec::new(),
        };
        let path = dir.path().join("app.sock");
        let error = AppServer::bind(&path, &config, "n1").err().unwrap();
        assert!(
            error.to_string().contains("no group `no-such-group`"),
            "{error}"
        );
        assert!(!path.exists());
    });
}

#[test]
fn programs_reconnect_after_restart() {
    run(async {
        let Server { dir, server } = Server::start(&AppSocketConfig::default());
        let path = dir.path().join("app.sock");
        let second_bind = AppServer::bind(&path, &AppSocketConfig::default(), "n1");
        assert_eq!(second_bind.err().unwrap().kind(), io::ErrorKind::AddrInUse);
        let server = Server { dir, server };
        let (_, program) = server.open("first").await;
        let Server { dir, server } = server;
        drop(server);
        run_blocking(move || assert!(receive_message(&program).is_none())).await;
        let server = AppServer::bind(&path, &AppSocketConfig::default(), "n1").unwrap();
        Server { dir, server }.open("second").await;
    });
}
