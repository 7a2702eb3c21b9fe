//! Tests of the asynchronous interface against a simulated daemon.

mod fake;

use std::io::{Read, Write};
use std::net::TcpStream;

use fake::{DaemonSession, FakeDaemon, TIMEOUT, connect_client, flow_of};
use holdfast_api::app::{FromDaemon, HandOffItem, ToDaemon};
use holdfast_api::{Arrival, Drain, Service, Session, TcpConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

async fn serve_listener(session: &Session, peer: &DaemonSession) -> (Service, u32) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = session.serve("files", listener).unwrap();
    (service, peer.receive_serve("files"))
}

async fn accept(service: &Service) -> (TcpConnection, Option<Vec<u8>>) {
    match timeout(TIMEOUT, service.accept())
        .await
        .expect("exceeded time: an arrival")
        .unwrap()
    {
        Arrival::New(connection) => (connection, None),
        Arrival::HandedOff { connection, state } => (connection, Some(state)),
    }
}

async fn exchange(connection: &mut TcpConnection, client: &mut TcpStream) {
    client.write_all(b"ping").unwrap();
    let mut buffer = [0; 4];
    connection.read_exact(&mut buffer).await.unwrap();
    connection.write_all(&buffer).await.unwrap();
    client.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"ping");
}

#[tokio::test]
async fn connection_moves_away_and_back() {
    let daemon = FakeDaemon::new();
    let (first, first_peer) = daemon.open("n1");
    let (second, second_peer) = daemon.open("n2");
    let (first_service, first_number) = serve_listener(&first, &first_peer).await;
    let (second_service, second_number) = serve_listener(&second, &second_peer).await;
    let mut client = connect_client(first_service.listener().local_addr().unwrap());
    let (mut connection, _) = accept(&first_service).await;
    let flow = first_peer.receive_accepted(1)[0];
    let mut peers = (first_peer, second_peer);
    for round in 0..6u64 {
        exchange(&mut connection, &mut client).await;
        let to_second = round % 2 == 0;
        let (service, number, name) = if to_second {
            (&second_service, second_number, "n2")
        } else {
            (&first_service, first_number, "n1")
        };
        let relay = spawn_blocking(move || {
            let (donor, acceptor) = if to_second {
                (&peers.0, &peers.1)
            } else {
                (&peers.1, &peers.0)
            };
            donor.send(&FromDaemon::HandoffRequested {
                flows: vec![flow],
                to: name.into(),
                drain: Drain::None,
            });
            let (item, descriptor) = donor.receive_hand_off(name).pop().unwrap();
            acceptor.hand_over(round, number, item, descriptor);
            acceptor.send(&FromDaemon::Activate { ids: vec![round] });
            peers
        });
        let destination = timeout(TIMEOUT, connection.wait_handoff_request())
            .await
            .expect("exceeded time: asked");
        let leaving = tokio::spawn(connection.hand_off(destination, vec![round as u8]));
        peers = relay.await.unwrap();
        let (arrived, state) = accept(service).await;
        assert_eq!(state, Some(vec![round as u8]));
        let donor = if to_second { &peers.0 } else { &peers.1 };
        donor.send(&FromDaemon::Moved {
            flows: vec![flow],
            to: name.into(),
        });
        leaving.await.unwrap().unwrap();
        connection = arrived;
    }
    exchange(&mut connection, &mut client).await;
    connection.shutdown().await.unwrap();
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
}

#[tokio::test]
async fn handoff_completes_when_its_future_is_dropped() {
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let (service, _) = serve_listener(&session, &peer).await;
    let address = service.listener().local_addr().unwrap();
    let mut client = connect_client(address);
    let (connection, _) = accept(&service).await;
    let flow = peer.receive_accepted(1)[0];
    let mut hand_off = Box::pin(connection.hand_off("n2", vec![]));
    // Polled once, then dropped.
    assert!(
        timeout(std::time::Duration::ZERO, &mut hand_off)
            .await
            .is_err()
    );
    drop(hand_off);
    let HandOffItem { flow: left, .. } = peer.receive_hand_off("n2").pop().unwrap().0;
    assert_eq!(left, flow);
    peer.send(&FromDaemon::Kept {
        flows: vec![flow],
        reason: "no".into(),
    });
    assert_eq!(peer.receive().0, ToDaemon::Closed { flows: vec![flow] });
    assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
}

#[tokio::test]
async fn handoffs_of_many_tasks_share_batches() {
    const TASKS: usize = 300;
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let (service, _) = serve_listener(&session, &peer).await;
    let address = service.listener().local_addr().unwrap();
    let mut clients = Vec::new();
    let mut tasks = Vec::new();
    for _ in 0..TASKS {
        clients.push(connect_client(address));
        let (connection, _) = accept(&service).await;
        tasks.push(tokio::spawn(async move {
            let destination = connection.wait_handoff_request().await;
            connection.hand_off(destination, vec![1]).await
        }));
    }
    let batches = spawn_blocking(move || {
        let flows = peer.receive_accepted(TASKS);
        peer.send(&FromDaemon::HandoffRequested {
            flows,
            to: "n2".into(),
            drain: Drain::None,
        });
        let (mut seen, mut batches) = (0, 0);
        while seen < TASKS {
            let items = peer.receive_hand_off("n2");
            seen += items.len();
            batches += 1;
            let flows = items.iter().map(|(item, _)| item.flow).collect();
            peer.send(&FromDaemon::Moved {
                flows,
                to: "n2".into(),
            });
        }
        assert_eq!(seen, TASKS);
        batches
    });
    for task in tasks {
        assert_eq!(
            timeout(TIMEOUT, task)
                .await
                .expect("exceeded time: an end")
                .unwrap()
                .unwrap()
                .to,
            "n2"
        );
    }
    // The number depends on the scheduler; fewer batches than connections show that the session merges them.
    assert!(batches.await.unwrap() < TASKS);
    for mut client in clients {
        assert_eq!(client.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[tokio::test]
async fn repeated_request_gets_one_answer() {
    let daemon = FakeDaemon::new();
    let (session, peer) = daemon.open("n1");
    let (service, _) = serve_listener(&session, &peer).await;
    let client = connect_client(service.listener().local_addr().unwrap());
    let (connection, _) = accept(&service).await;
    let flow = flow_of(&client);
    peer.receive_accepted(1);
    for to in ["n2", "n3"] {
        peer.send(&FromDaemon::HandoffRequested {
            flows: vec![flow],
            to: to.into(),
            drain: Drain::None,
        });
    }
    while connection
        .handoff_request()
        .is_none_or(|destination| destination.to != "n3")
    {
        tokio::task::yield_now().await;
    }
    connection.decline("never");
    assert_eq!(connection.handoff_request(), None);
    assert_eq!(
        peer.receive().0,
        ToDaemon::Declined {
            flows: vec![flow],
            reason: "never".into()
        }
    );
}
