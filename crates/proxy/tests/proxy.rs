//! Tests of a whole proxy on the loopback device, without a daemon.

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use holdfast_api::Session;
use holdfast_proxy::{Proxy, ProxyConfig, ProxyEvent, Totals, proxy_protocol};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

/// Longer than any step takes on a heavily loaded machine; reached only by a failing test.
const PATIENCE: Duration = Duration::from_secs(60);

/// A proxy that serves until it is stopped.
struct RunningProxy {
    address: SocketAddr,
    addresses: watch::Sender<BTreeSet<SocketAddr>>,
    events: Arc<Mutex<Vec<ProxyEvent>>>,
    stop: oneshot::Sender<Duration>,
    stopped: JoinHandle<Totals>,
}

impl RunningProxy {
    fn start(to: SocketAddr) -> Self {
        Self::start_with(ProxyConfig {
            to,
            sends_header: false,
            connections_max: 1000,
        })
    }

    fn start_with(config: ProxyConfig) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&events);
        let report = move |event| sink.lock().unwrap().push(event);
        let mut proxy = Proxy::new(&Session::detached(), "web", config, report);
        let address = proxy.listen(loopback(0)).unwrap();
        let (addresses, mut receiver) = watch::channel(BTreeSet::new());
        let (stop, stop_requested) = oneshot::channel();
        let stopped = tokio::spawn(async move {
            let drain_max = tokio::select! {
                never = proxy.serve(&mut receiver) => match never {},
                drain_max = stop_requested => drain_max.unwrap(),
            };
            proxy.drain(tokio::time::sleep(drain_max)).await
        });
        Self {
            address,
            addresses,
            events,
            stop,
            stopped,
        }
    }

    async fn connect(&self) -> TcpStream {
        patient(TcpStream::connect(self.address)).await.unwrap()
    }

    fn has_event(&self, is_wanted: impl Fn(&ProxyEvent) -> bool) -> bool {
        self.events.lock().unwrap().iter().any(is_wanted)
    }

    async fn wait_for_event(&self, is_wanted: impl Fn(&ProxyEvent) -> bool) {
        patient(async {
            while !self.has_event(&is_wanted) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    }

    async fn stop(self, drain_max: Duration) -> Totals {
        self.stop.send(drain_max).unwrap();
        patient(self.stopped).await.unwrap()
    }
}

fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new([127, 0, 0, 1].into(), port)
}

async fn patient<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future)
        .await
        .expect("exceeded time: a step of the test")
}

/// Returns the address of a server that sends all bytes back, until the end of the stream.
async fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind(loopback(0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut reader, mut writer) = stream.split();
                // A client that resets its connection ends the copy with an error.
                let _ = tokio::io::copy(&mut reader, &mut writer).await;
            });
        }
    });
    address
}

async fn exchange(stream: &mut TcpStream, sent: &[u8]) {
    patient(stream.write_all(sent)).await.unwrap();
    let mut received = vec![0; sent.len()];
    patient(stream.read_exact(&mut received)).await.unwrap();
    assert_eq!(received, sent);
}

async fn assert_reset(mut stream: TcpStream) {
    let result = patient(stream.read(&mut [0; 1])).await;
    let error = result.expect_err("a reset expected, not the end of the stream");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_short_connections_are_complete() {
    const CLIENTS: u64 = 20;
    const CONNECTIONS_EACH: u64 = 150;
    let proxy = RunningProxy::start(echo_server().await);
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let address = proxy.address;
        clients.spawn(async move {
            for turn in 0..CONNECTIONS_EACH {
                let mut stream = patient(TcpStream::connect(address)).await.unwrap();
                exchange(
                    &mut stream,
                    format!("client {client} turn {turn}").as_bytes(),
                )
                .await;
                stream.shutdown().await.unwrap();
                assert_eq!(patient(stream.read(&mut [0; 1])).await.unwrap(), 0);
            }
        });
    }
    while let Some(result) = clients.join_next().await {
        result.unwrap();
    }
    let totals = proxy.stop(PATIENCE).await;
    assert_eq!(totals.accepted, CLIENTS * CONNECTIONS_EACH, "{totals}");
    assert_eq!(totals.complete, totals.accepted, "{totals}");
    assert_eq!(totals.to_server_bytes, totals.to_client_bytes, "{totals}");
}

#[tokio::test]
async fn clients_of_a_refusing_server_are_reset_and_counted() {
    let closed = TcpListener::bind(loopback(0)).await.unwrap();
    let to = closed.local_addr().unwrap();
    drop(closed);
    let proxy = RunningProxy::start(to);
    for _ in 0..5 {
        // The reset may arrive before the connection is reported as made.
        let connect_and_read = async {
            let mut client = TcpStream::connect(proxy.address).await?;
            client.read(&mut [0; 1]).await
        };
        let error = patient(connect_and_read).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
    }
    let is_report = |event: &ProxyEvent| {
        matches!(
            event,
            ProxyEvent::ServerUnavailable {
                clients_reset: 1,
                ..
            }
        )
    };
    assert!(proxy.has_event(is_report));
    let reports = proxy.events.lock().unwrap().len();
    assert_eq!(reports, 2, "one for the listener, one for all clients");

    let server = TcpListener::bind(to).await.unwrap();
    let _client = proxy.connect().await;
    patient(server.accept()).await.unwrap();
    proxy
        .wait_for_event(|event| matches!(event, ProxyEvent::ServerAvailable { .. }))
        .await;
    let totals = proxy.stop(Duration::ZERO).await;
    assert_eq!((totals.refused, totals.cut), (5, 1), "{totals}");
}

#[tokio::test]
async fn server_gets_the_header_before_the_client_s_bytes() {
    let server = TcpListener::bind(loopback(0)).await.unwrap();
    let proxy = RunningProxy::start_with(ProxyConfig {
        to: server.local_addr().unwrap(),
        sends_header: true,
        connections_max: 10,
    });
    let mut client = proxy.connect().await;
    client.write_all(b"GET").await.unwrap();
    client.shutdown().await.unwrap();
    let (mut stream, _) = patient(server.accept()).await.unwrap();
    let mut received = Vec::new();
    patient(stream.read_to_end(&mut received)).await.unwrap();
    let header = proxy_protocol::header(client.local_addr().unwrap(), proxy.address);
    assert_eq!(received, [&header[..], b"GET"].concat());
}

#[tokio::test]
async fn clients_beyond_the_maximum_wait() {
    let proxy = RunningProxy::start_with(ProxyConfig {
        to: echo_server().await,
        sends_header: false,
        connections_max: 2,
    });
    let (mut first, mut second) = (proxy.connect().await, proxy.connect().await);
    exchange(&mut first, b"first").await;
    exchange(&mut second, b"second").await;
    let mut third = proxy.connect().await;
    third.write_all(b"third").await.unwrap();
    proxy
        .wait_for_event(|event| {
            matches!(
                event,
                ProxyEvent::ConnectionsMaxReached { connections_max: 2 }
            )
        })
        .await;
    exchange(&mut first, b"first again").await;
    drop(first);
    let mut received = [0; 5];
    patient(third.read_exact(&mut received)).await.unwrap();
    assert_eq!(&received, b"third");
    let totals = proxy.stop(Duration::ZERO).await;
    assert_eq!((totals.accepted, totals.cut), (3, 2), "{totals}");
}

#[tokio::test]
async fn drain_waits_for_open_connections_and_accepts_no_new_ones() {
    let proxy = RunningProxy::start(echo_server().await);
    let mut client = proxy.connect().await;
    exchange(&mut client, b"before").await;
    let (address, events) = (proxy.address, Arc::clone(&proxy.events));
    let stopping = tokio::spawn(proxy.stop(PATIENCE));
    let is_draining = |event: &ProxyEvent| matches!(event, ProxyEvent::Draining { open: 1 });
    patient(async {
        while !events.lock().unwrap().iter().any(is_draining) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    let refused = TcpStream::connect(address).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    exchange(&mut client, b"after").await;
    drop(client);
    let totals = stopping.await.unwrap();
    assert_eq!((totals.complete, totals.cut), (1, 0), "{totals}");
}

#[tokio::test]
async fn connections_open_at_the_end_of_a_drain_are_reset() {
    let proxy = RunningProxy::start(echo_server().await);
    let mut client = proxy.connect().await;
    exchange(&mut client, b"open").await;
    let totals = proxy.stop(Duration::ZERO).await;
    assert_eq!((totals.accepted, totals.cut), (1, 1), "{totals}");
    assert_reset(client).await;
}

#[tokio::test]
async fn listeners_follow_the_service_s_addresses() {
    let proxy = RunningProxy::start(echo_server().await);
    let mut client = proxy.connect().await;
    exchange(&mut client, b"first address").await;
    // A listener of another program, and a free address.
    let occupied = TcpListener::bind(loopback(0))
        .await
        .unwrap()
        .into_std()
        .unwrap();
    let occupied_address = occupied.local_addr().unwrap();
    let added_address: SocketAddr = "127.0.0.77:0".parse().unwrap();
    proxy
        .addresses
        .send_replace([occupied_address, added_address].into());
    proxy
        .wait_for_event(|event| matches!(event, ProxyEvent::CannotListen { address, .. } if *address == occupied_address))
        .await;
    let removed = loopback(0);
    assert!(proxy.has_event(
        |event| matches!(event, ProxyEvent::StoppedListening { address } if *address == removed)
    ));
    let is_added = |event: &ProxyEvent| matches!(event, ProxyEvent::Listening { address, .. } if address.ip() == added_address.ip());
    proxy.wait_for_event(is_added).await;
    exchange(&mut client, b"still open").await;

    drop(occupied);
    proxy.addresses.send_modify(|_| {});
    proxy
        .wait_for_event(|event| matches!(event, ProxyEvent::Listening { address, .. } if *address == occupied_address))
        .await;
    let mut second = patient(TcpStream::connect(occupied_address)).await.unwrap();
    exchange(&mut second, b"second address").await;
}
