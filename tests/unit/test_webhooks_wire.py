"""Webhooks are signed as OpenAI's SDK verifies it, and addresses of the inside are known as such."""

from __future__ import annotations

import time

import openai
import pytest

from batch_pipeline.wire import webhooks

PUBLIC = ["93.184.216.34", "2606:2800:220:1::1", "2002:5db8:d822::1", "::ffff:93.184.216.34", "64:ff9b::5db8:d822"]
INSIDE = [
    *("127.0.0.1", "127.8.8.8", "0.1.2.3", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
    *("192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2002:a00:1::1"),
    "2001:0:7f00:1::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert webhooks.is_public(address)


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_of_the_inside_are_not_public_in_whatever_dress(address: str) -> None:
    assert not webhooks.is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        *("", "hooks", "http://example.com/", "ftp://example.com/", "https://", "https:///path", "//example.com"),
        *("https://user@example.com/", "https://user:word@example.com/", "https://example.com/#part"),
        *("https://example.com:port/", "https://[::1/", "https://exa mple.com/", "https://exämple.com/"),
        *("https://127.0.0.1/", "https://[::1]/", "https://10.0.0.1:8443/x", "https://[::ffff:10.0.0.1]/"),
        *(
            "https://127.1/",
            "https://0/",
            "https://a..b/",
            "https://2130706433/",
            "https://0x7f.1/",
            "https://0177.0.0.1/",
            "https://127.0.0.1./",
        ),
        f"https://example.com/{'x' * 2000}",
    ],
)
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    assert webhooks.url_problem(url, allow_private=False)


def test_good_addresses_are_taken_and_private_ones_where_they_are_allowed() -> None:
    for url in ("https://example.com", "https://example.com:8443/hooks?x=1", "https://93.184.216.34/"):
        assert webhooks.url_problem(url, allow_private=False) is None
    for url in ("http://127.0.0.1:80/", "http://localhost/x", "https://10.0.0.1/"):
        assert webhooks.url_problem(url, allow_private=True) is None


def test_signature_is_the_one_that_the_sdk_verifies() -> None:
    secret = webhooks.new_secret()
    body = b'{"id":"evt_1","object":"event","created_at":1,"type":"batch.completed","data":{"id":"batch_1"}}'
    sent = webhooks.headers("evt_1", body, secret=secret, timestamp=int(time.time()))
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(body, sent)
    assert isinstance(event, openai.types.webhooks.BatchCompletedWebhookEvent)
    assert event.data.id == "batch_1"
    for wrong in (body.replace(b"batch_1", b"batch_2"), body + b" "):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(wrong, sent)
    other = openai.OpenAI(api_key="none", webhook_secret=webhooks.new_secret())
    with pytest.raises(openai.InvalidWebhookSignatureError):
        other.webhooks.unwrap(body, sent)


def test_signature_is_that_of_the_standards_own_example() -> None:
    sent = webhooks.headers(
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        b'{"test": 2432232314}',
        secret="whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        timestamp=1614265330,
    )
    assert sent["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
