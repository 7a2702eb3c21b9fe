//! Tests of a join between loopback connections.

use std::sync::Arc;

use rustix::net::sockopt::{
    set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;

/// Longer than any step takes on a heavily loaded machine; reached only by a failing test.
const PATIENCE: Duration = Duration::from_secs(60);
/// Small socket buffers, in bytes, so that few bytes fill all queues on the way.
const SMALL_BUFFER_BYTES: usize = 16 * 1024;
/// More bytes than all queues between the two ends take.
const QUEUED_BYTES_MAX: usize = 8 << 20;

/// A join with the far ends of its connections.
struct RunningJoin {
    client: TcpStream,
    server: TcpStream,
    pipes: Arc<PipePool>,
    result: JoinHandle<(Result<(), JoinFailure>, u64, u64)>,
}

impl RunningJoin {
    async fn start() -> Self {
        Self::start_with_silence_max(PATIENCE).await
    }

    async fn start_with_silence_max(silence_max: Duration) -> Self {
        Self::start_with(TimeLimits {
            silence_after_server_end: silence_max,
            stall: PATIENCE,
        })
        .await
    }

    async fn start_with(limits: TimeLimits) -> Self {
        let (client, client_near) = connected_pair().await;
        let (server_near, server) = connected_pair().await;
        let pipes = Arc::new(PipePool::default());
        let pool = Arc::clone(&pipes);
        let result = tokio::spawn(async move {
            for stream in [&client_near, &server_near] {
                set_socket_linger(stream, Some(Duration::ZERO)).unwrap();
            }
            let bytes = ByteCounts::default();
            let streams = JoinedStreams {
                client: &client_near,
                server: &server_near,
            };
            let result = join(streams, &pool, &bytes, limits).await;
            if result.is_ok() {
                for stream in [&client_near, &server_near] {
                    set_socket_linger(stream, None).unwrap();
                }
            }
            (
                result,
                bytes.to_server.into_inner(),
                bytes.to_client.into_inner(),
            )
        });
        Self {
            client,
            server,
            pipes,
            result,
        }
    }
}

/// Returns the numbers of bytes of a join that both sides have ended.
async fn complete(result: JoinHandle<(Result<(), JoinFailure>, u64, u64)>) -> (u64, u64) {
    let (result, to_server, to_client) = patient(result).await.unwrap();
    result.unwrap();
    (to_server, to_client)
}

/// Returns the side that broke a join.
async fn broken_side(result: JoinHandle<(Result<(), JoinFailure>, u64, u64)>) -> Side {
    match patient(result).await.unwrap().0 {
        Err(JoinFailure::Broken(side)) => side,
        other => panic!("a broken join expected, not {other:?}"),
    }
}

async fn patient<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future)
        .await
        .expect("exceeded time: a step of the test")
}

/// Returns the connecting and the accepting end of a loopback connection with small buffers.
async fn connected_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    set_socket_recv_buffer_size(&listener, SMALL_BUFFER_BYTES).unwrap();
    set_socket_send_buffer_size(&listener, SMALL_BUFFER_BYTES).unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    set_socket_recv_buffer_size(&socket, SMALL_BUFFER_BYTES).unwrap();
    set_socket_send_buffer_size(&socket, SMALL_BUFFER_BYTES).unwrap();
    let address = listener.local_addr().unwrap();
    let (connected, accepted) = tokio::join!(socket.connect(address), listener.accept());
    (connected.unwrap(), accepted.unwrap().0)
}

/// Returns pseudo-random bytes: a change of their order is noticed.
fn numbered_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

/// Closes a socket with a reset.
fn reset(stream: TcpStream) {
    set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
}

async fn read_to_end(stream: &mut TcpStream) -> (Vec<u8>, io::Result<()>) {
    let mut bytes = Vec::new();
    let result = patient(stream.read_to_end(&mut bytes)).await;
    (bytes, result.map(drop))
}

#[track_caller]
fn assert_reset(result: io::Result<()>) {
    let error = result.expect_err("a reset expected, not the end of the stream");
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_pass_both_ways_unchanged() {
    let RunningJoin {
        client,
        server,
        result,
        ..
    } = RunningJoin::start().await;
    let (request, response) = (numbered_bytes(3 << 20, 1), numbered_bytes(5 << 20, 2));
    let exchange = |stream: TcpStream, sent: Vec<u8>| async move {
        let (mut reader, mut writer) = stream.into_split();
        let writing = tokio::spawn(async move {
            writer.write_all(&sent).await.unwrap();
            writer.shutdown().await.unwrap();
        });
        let mut received = Vec::new();
        reader.read_to_end(&mut received).await.unwrap();
        writing.await.unwrap();
        received
    };
    let at_client = tokio::spawn(exchange(client, request.clone()));
    let at_server = tokio::spawn(exchange(server, response.clone()));
    assert!(
        patient(at_server).await.unwrap() == request,
        "the request changed"
    );
    assert!(
        patient(at_client).await.unwrap() == response,
        "the response changed"
    );
    assert_eq!(complete(result).await, (3 << 20, 5 << 20));
}

#[tokio::test]
async fn end_of_one_stream_leaves_the_other_open() {
    let RunningJoin {
        mut client,
        mut server,
        result,
        ..
    } = RunningJoin::start().await;
    client.write_all(b"request").await.unwrap();
    client.shutdown().await.unwrap();
    let (request, ended) = read_to_end(&mut server).await;
    ended.unwrap();
    assert_eq!(request, b"request");
    let response = numbered_bytes(1 << 20, 3);
    let sent = response.clone();
    let writing = tokio::spawn(async move {
        server.write_all(&sent).await.unwrap();
    });
    let (received, ended) = read_to_end(&mut client).await;
    ended.unwrap();
    assert!(received == response, "the response changed");
    writing.await.unwrap();
    assert_eq!(complete(result).await, (7, 1 << 20));
}

#[tokio::test]
async fn reset_of_the_client_is_a_reset_at_the_server() {
    let mut running = RunningJoin::start().await;
    reset(running.client);
    let (received, ended) = read_to_end(&mut running.server).await;
    assert_eq!(received, b"");
    assert_reset(ended);
    assert_eq!(broken_side(running.result).await, Side::Client);
}

#[tokio::test]
async fn bytes_before_a_reset_are_passed_on() {
    let mut running = RunningJoin::start().await;
    // The request stays unread in the server's socket, as with a server that answers early.
    running.client.write_all(b"request").await.unwrap();
    patient(running.server.peek(&mut [0; 7])).await.unwrap();
    running.server.write_all(b"response").await.unwrap();
    drop(running.server);
    let (received, ended) = read_to_end(&mut running.client).await;
    assert_eq!(received, b"response");
    assert_reset(ended);
    assert_eq!(broken_side(running.result).await, Side::Server);
}

#[tokio::test]
async fn reset_after_the_end_of_the_stream_is_noticed_without_traffic() {
    let mut running = RunningJoin::start().await;
    running.client.shutdown().await.unwrap();
    let (_, ended) = read_to_end(&mut running.server).await;
    ended.unwrap();
    reset(running.client);
    // The server has received the end of the stream: only an error condition tells of the reset.
    let ready = patient(running.server.ready(Interest::ERROR))
        .await
        .unwrap();
    assert!(ready.is_error());
    assert_eq!(broken_side(running.result).await, Side::Client);
}

/// Fills all queues from the client to a server that does not read. Returns the sent bytes.
async fn fill_queues(client: &TcpStream) -> Vec<u8> {
    let bytes = numbered_bytes(QUEUED_BYTES_MAX, 4);
    let mut sent = 0;
    // A queue that stays full for this long is not emptied by the join any more.
    while timeout(Duration::from_millis(200), client.writable())
        .await
        .is_ok()
    {
        match client.try_write(&bytes[sent..]) {
            Ok(length) => sent += length,
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
        }
    }
    bytes[..sent].to_vec()
}

#[tokio::test]
async fn reset_behind_full_queues_is_noticed() {
    let mut running = RunningJoin::start().await;
    let sent = fill_queues(&running.client).await;
    reset(running.client);
    assert_eq!(broken_side(running.result).await, Side::Client);
    let (received, ended) = read_to_end(&mut running.server).await;
    assert_reset(ended);
    assert!(
        sent.starts_with(&received),
        "other bytes arrived than were sent"
    );
}

#[tokio::test]
async fn slow_reader_gets_every_byte() {
    let mut running = RunningJoin::start().await;
    let sent = fill_queues(&running.client).await;
    assert!(
        sent.len() < QUEUED_BYTES_MAX,
        "{} bytes wait in the join",
        sent.len()
    );
    running.client.shutdown().await.unwrap();
    let (received, ended) = read_to_end(&mut running.server).await;
    ended.unwrap();
    assert!(
        received == sent,
        "{} of {} bytes",
        received.len(),
        sent.len()
    );
    drop(running.server);
    complete(running.result).await;
}

#[tokio::test]
async fn side_that_takes_no_bytes_is_given_up() {
    let mut running = RunningJoin::start_with(TimeLimits {
        silence_after_server_end: PATIENCE,
        stall: Duration::from_millis(50),
    })
    .await;
    // The client reads nothing.
    let mut server = running.server;
    let writing = tokio::spawn(async move {
        let bytes = numbered_bytes(QUEUED_BYTES_MAX, 5);
        server.write_all(&bytes).await
    });
    let result = patient(running.result).await.unwrap().0;
    assert!(matches!(result, Err(JoinFailure::Stalled)), "{result:?}");
    assert_reset(patient(writing).await.unwrap());
    let (_, ended) = read_to_end(&mut running.client).await;
    assert_reset(ended);
}

#[tokio::test]
async fn idle_connection_holds_no_pipe() {
    let mut running = RunningJoin::start().await;
    for _ in 0..3 {
        let mut buffer = [0; 4];
        running.client.write_all(b"ping").await.unwrap();
        patient(running.server.read_exact(&mut buffer))
            .await
            .unwrap();
        running.server.write_all(b"pong").await.unwrap();
        patient(running.client.read_exact(&mut buffer))
            .await
            .unwrap();
        assert_eq!(&buffer, b"pong");
    }
    // The join returns the pipe after its attempt to read more.
    while running.pipes.idle_count() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        running.pipes.idle_count(),
        1,
        "one pipe serves both directions in turn"
    );
}

#[tokio::test]
async fn silent_client_of_a_server_that_closed_is_given_up() {
    let mut running = RunningJoin::start_with_silence_max(Duration::from_millis(50)).await;
    running.client.write_all(b"request").await.unwrap();
    let mut request = [0; 7];
    patient(running.server.read_exact(&mut request))
        .await
        .unwrap();
    drop(running.server);
    assert_eq!(complete(running.result).await, (7, 0));
    let (_, ended) = read_to_end(&mut running.client).await;
    ended.unwrap();
}

#[tokio::test]
async fn waiting_server_of_a_client_that_ended_is_not_given_up() {
    let mut running = RunningJoin::start_with_silence_max(Duration::from_millis(20)).await;
    running.client.shutdown().await.unwrap();
    let (_, ended) = read_to_end(&mut running.server).await;
    ended.unwrap();
    sleep(Duration::from_millis(200)).await;
    running.server.write_all(b"late").await.unwrap();
    drop(running.server);
    let (received, ended) = read_to_end(&mut running.client).await;
    ended.unwrap();
    assert_eq!(received, b"late");
    complete(running.result).await;
}
