"""A chat in Streamlit with a model of `kvasir serve`: each turn finds the KV cache of those before.

streamlit run examples/streamlit_chat.py
"""

import streamlit as st
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none is needed on loopback")
messages = st.session_state.setdefault("messages", [])
if question := st.chat_input("Ask"):
    messages.append({"role": "user", "content": question})
for message in messages:
    st.chat_message(message["role"]).write(message["content"])
if messages and messages[-1]["role"] == "user":
    stream = client.chat.completions.create(model="kvasir-demo", messages=messages, stream=True)
    answer = st.chat_message("assistant").write_stream(stream)
    messages.append({"role": "assistant", "content": answer})
