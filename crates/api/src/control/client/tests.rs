use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use super::*;

/// Starts a daemon that gives these answers, one per connection; its thread returns the requests.
fn start_fake_daemon(
    answers: Vec<(u16, String)>,
) -> (tempfile::TempDir, PathBuf, thread::JoinHandle<Vec<String>>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let thread = thread::spawn(move || {
        answers
            .into_iter()
            .map(|(status, body)| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                let mut part = [0; 4096];
                while !is_complete(&request) {
                    let length = stream.read(&mut part).unwrap();
                    assert_ne!(length, 0, "an incomplete request");
                    request.extend(&part[..length]);
                }
                let length = body.len();
                write!(
                    stream,
                    "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}"
                )
                .unwrap();
                String::from_utf8(request).unwrap()
            })
            .collect()
    });
    (directory, path, thread)
}

fn is_complete(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else {
        return false;
    };
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .map_or(0, |n| n.parse().unwrap());
    body.len() >= length
}

const FLOW: &str = "tcp:10.0.0.1:80-10.0.1.2:4242";

#[test]
fn client_sends_requests_and_parses_answers() {
    let entry = |n: u32| {
        format!(
            r#"{{"flow":"tcp:10.0.0.1:80-10.0.1.2:{n}","state":"owned","owner":"n1","epoch":1,"pool":null,"program":"x"}}"#
        )
    };
    let (_directory, path, thread) = start_fake_daemon(vec![
        (
            200,
            format!(r#"{{"flows":[{}],"total":2,"next":"{FLOW}"}}"#, entry(4242)),
        ),
        (
            200,
            format!(r#"{{"flows":[{}],"total":2,"next":null}}"#, entry(4243)),
        ),
        (202, r#"{"id":7,"flows":1}"#.into()),
    ]);
    let client = BlockingControlClient::new(&path).unwrap();
    let query = FlowListQuery {
        pool: Some("a b".into()),
        limit: Some(1),
        ..FlowListQuery::default()
    };
    let flows = client.run(|client| client.all_flows(&query)).unwrap();
    assert_eq!(
        flows
            .flows
            .iter()
            .map(|entry| entry.flow.remote().port())
            .collect::<Vec<_>>(),
        [4242, 4243]
    );
    let request: HandoffRequest =
        serde_json::from_str(&format!(r#"{{"flows":["{FLOW}"],"to":"n2"}}"#)).unwrap();
    assert_eq!(
        client.run(|client| client.hand_off(&request)).unwrap(),
        HandoffAccepted { id: 7, flows: 1 }
    );
    let requests = thread.join().unwrap();
    assert!(
        requests[0].starts_with("GET /v1/flows?limit=1&pool=a%20b HTTP/1.1\r\n"),
        "{}",
        requests[0]
    );
    assert!(
        requests[1].contains("after=tcp%3A10.0.0.1%3A80-10.0.1.2%3A4242"),
        "{}",
        requests[1]
    );
    assert!(
        requests[2].ends_with(&serde_json::to_string(&request).unwrap()),
        "{}",
        requests[2]
    );
}

#[test]
fn client_errors_name_the_problem() {
    let (_directory, path, _thread) = start_fake_daemon(vec![
        (
            404,
            r#"{"error":"no such flow","what_to_do":"see `holdfast flow list`"}"#.into(),
        ),
        (500, "oops".into()),
        (200, "{}".into()),
    ]);
    let client = BlockingControlClient::new(&path).unwrap();
    let flow = FLOW.parse().unwrap();
    let error = client.run(|client| client.flow(&flow)).unwrap_err();
    assert_eq!(error.to_string(), "no such flow (see `holdfast flow list`)");
    let error = client.run(|client| client.status()).unwrap_err();
    assert!(error.to_string().contains("oops"));
    assert!(matches!(
        client.run(|client| client.status()).unwrap_err(),
        ClientError::UnexpectedForm(_)
    ));
    let absent = BlockingControlClient::new("/nowhere/control.sock").unwrap();
    assert!(matches!(
        absent.run(|client| client.status()).unwrap_err(),
        ClientError::NoDaemon { .. }
    ));
}
